"""A cluster of several nodes on one machine: hosts in namespaces, links by the kernel's TCP, and faults."""
