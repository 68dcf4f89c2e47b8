"""An evaluation of Kubernetes's rules for NetworkPolicies."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field

from manifest_documents import NAMESPACE, Document
from manifest_pods import selects

SIDES = {"Ingress": "from", "Egress": "to"}


@dataclass(frozen=True)
class Peer:
    """A pod; with an empty namespace, something outside the cluster."""

    labels: Mapping[str, str] = field(default_factory=dict)
    namespace: str = NAMESPACE
    address: str = "10.0.0.7"
    labels_of_namespace: Mapping[str, str] = field(default_factory=dict)

    @property
    def namespace_labels(self) -> dict[str, str]:
        """Return the labels of its namespace, with the one that Kubernetes puts on every namespace."""
        return {"kubernetes.io/metadata.name": self.namespace, **self.labels_of_namespace}


OUTSIDE = Peer(namespace="", address="203.0.113.7")


def reaches(documents: list[Document], source: Peer, target: Peer, port: int, protocol: str = "TCP") -> bool:
    """Return whether a connection is allowed by the policies of the target, and by those of the source."""
    into = _allows(documents, "Ingress", target, source, port, protocol)
    return into and _allows(documents, "Egress", source, target, port, protocol)


def _allows(documents: list[Document], side: str, pod: Peer, other: Peer, port: int, protocol: str) -> bool:
    """Return whether a pod may be in touch with another: what any of its policies allows, or all if none selects it."""
    policies = [
        d["spec"]
        for d in documents
        if d["kind"] == "NetworkPolicy"
        and d["metadata"].get("namespace", NAMESPACE) == pod.namespace
        and side in d["spec"]["policyTypes"]
        and selects(d["spec"]["podSelector"], pod.labels)
    ]
    if not policies:
        return True
    rules = [rule for spec in policies for rule in spec.get(side.lower(), [])]
    return any(_fits(rule, SIDES[side], pod, other, port, protocol) for rule in rules)


def _fits(rule: Document, peers: str, pod: Peer, other: Peer, port: int, protocol: str) -> bool:
    by_port = "ports" not in rule or any(_is_port(entry, port, protocol) for entry in rule["ports"])
    by_peer = peers not in rule or any(_is_peer(entry, other, pod.namespace) for entry in rule[peers])
    return by_port and by_peer


def _is_port(entry: Document, port: int, protocol: str) -> bool:
    assert isinstance(entry["port"], int), "the policies here name ports by number"
    in_range = entry["port"] <= port <= entry.get("endPort", entry["port"])
    return entry.get("protocol", "TCP") == protocol and in_range


def _is_peer(entry: Document, peer: Peer, namespace: str) -> bool:
    if "ipBlock" in entry:
        address = ipaddress.ip_address(peer.address)
        inside = address in ipaddress.ip_network(entry["ipBlock"]["cidr"])
        return inside and not any(address in ipaddress.ip_network(n) for n in entry["ipBlock"].get("except", []))
    if not peer.namespace:
        return False
    if "namespaceSelector" in entry:
        right_namespace = selects(entry["namespaceSelector"], peer.namespace_labels)
    else:
        right_namespace = peer.namespace == namespace
    return right_namespace and selects(entry.get("podSelector", {}), peer.labels)
