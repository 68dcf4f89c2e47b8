"""An evaluation of Kubernetes's rules for ingress NetworkPolicies."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field

from manifest_documents import NAMESPACE, Document
from manifest_pods import selects


@dataclass(frozen=True)
class Peer:
    """A pod; with an empty namespace, something outside the cluster."""

    labels: Mapping[str, str] = field(default_factory=dict)
    namespace: str = NAMESPACE
    address: str = "203.0.113.7"

    @property
    def namespace_labels(self) -> dict[str, str]:
        """Return the labels that Kubernetes puts on every namespace."""
        return {"kubernetes.io/metadata.name": self.namespace}


OUTSIDE = Peer(namespace="")


def reaches(documents: list[Document], source: Peer, target: Peer, port: int) -> bool:
    """Return whether a TCP connection is allowed.

    A pod that no policy selects accepts everything; otherwise it accepts what any of its policies allows.
    """
    policies = [
        d
        for d in documents
        if d["kind"] == "NetworkPolicy"
        and d["metadata"].get("namespace", NAMESPACE) == target.namespace
        and "Ingress" in d["spec"]["policyTypes"]
        and selects(d["spec"]["podSelector"], target.labels)
    ]
    if not policies:
        return True
    return any(_lets_in(rule, source, target, port) for d in policies for rule in d["spec"].get("ingress", []))


def _lets_in(rule: Document, source: Peer, target: Peer, port: int) -> bool:
    by_port = "ports" not in rule or any(_is_port(entry, port) for entry in rule["ports"])
    by_source = "from" not in rule or any(_is_source(entry, source, target) for entry in rule["from"])
    return by_port and by_source


def _is_port(entry: Document, port: int) -> bool:
    assert isinstance(entry["port"], int), "the policies here name ports by number"
    return entry.get("protocol", "TCP") == "TCP" and entry["port"] <= port <= entry.get("endPort", entry["port"])


def _is_source(entry: Document, source: Peer, target: Peer) -> bool:
    if "ipBlock" in entry:
        address = ipaddress.ip_address(source.address)
        inside = address in ipaddress.ip_network(entry["ipBlock"]["cidr"])
        return inside and not any(address in ipaddress.ip_network(n) for n in entry["ipBlock"].get("except", []))
    if not source.namespace:
        return False
    if "namespaceSelector" in entry:
        right_namespace = selects(entry["namespaceSelector"], source.namespace_labels)
    else:
        right_namespace = source.namespace == target.namespace
    return right_namespace and selects(entry.get("podSelector", {}), source.labels)
