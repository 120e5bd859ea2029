"""A radix tree over packed token ids. It finds the longest shared prefix; it knows nothing of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from langgraph_latent.handle.tokens import TOKEN_BYTES, common_tokens

Value = TypeVar("Value")


class Node(Generic[Value]):
    """A point in the tree. `edge` is the packed tokens from its parent to it; `value` what ends exactly here."""

    __slots__ = ("edge", "parent", "children", "value")

    def __init__(self, edge: bytes, parent: Node[Value] | None) -> None:
        self.edge = edge
        self.parent = parent
        self.children: dict[bytes, Node[Value]] = {}
        self.value: Value | None = None


class PrefixIndex(Generic[Value]):
    """Maps token sequences to values. Not thread-safe: its owner locks."""

    def __init__(self) -> None:
        self._root: Node[Value] = Node(b"", None)

    def insert(self, tokens: bytes) -> Node[Value]:
        """The node where `tokens` ends, made if need be."""
        node, at = self._root, 0
        while at < len(tokens):
            key = tokens[at : at + TOKEN_BYTES]
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(tokens[at:], node)
                return child
            if not tokens.startswith(child.edge, at):
                child = self._split(child, common_tokens(child.edge, tokens[at:]) * TOKEN_BYTES)
            node, at = child, at + len(child.edge)
        return node

    def remove(self, node: Node[Value]) -> None:
        """Drop a node's value, and the nodes that are not needed any more."""
        node.value = None
        while node.parent is not None and node.value is None and len(node.children) < 2:
            parent = node.parent
            if node.children:  # in the middle of a path: join it with its only child
                (child,) = node.children.values()
                child.edge, child.parent = node.edge + child.edge, parent
                parent.children[child.edge[:TOKEN_BYTES]] = child
            else:
                del parent.children[node.edge[:TOKEN_BYTES]]
            node.parent = None
            node = parent

    def matches(self, tokens: bytes) -> Iterator[tuple[int, Value]]:
        """Number of shared leading tokens and value, for every value that shares any; the most shared first."""
        path: list[tuple[Node[Value], int]] = []
        child, at = self._root.children.get(tokens[:TOKEN_BYTES]), 0
        while child is not None:
            is_shared = tokens.startswith(child.edge, at)
            at += len(child.edge) if is_shared else common_tokens(child.edge, tokens[at:]) * TOKEN_BYTES
            path.append((child, at // TOKEN_BYTES))
            child = child.children.get(tokens[at : at + TOKEN_BYTES]) if is_shared else None
        below: Node[Value] | None = None
        for node, shared in reversed(path):
            for found in _under(node, below):
                yield shared, found
            below = node

    def __iter__(self) -> Iterator[tuple[bytes, Value]]:
        """Every stored sequence with its value."""
        stack = [(self._root, b"")]
        while stack:
            node, prefix = stack.pop()
            path = prefix + node.edge
            if node.value is not None:
                yield path, node.value
            stack.extend((child, path) for child in node.children.values())

    def _split(self, child: Node[Value], at: int) -> Node[Value]:
        """Put a node into a child's edge, `at` bytes down."""
        parent = child.parent
        assert parent is not None
        assert 0 < at < len(child.edge)
        middle: Node[Value] = Node(child.edge[:at], parent)
        parent.children[middle.edge[:TOKEN_BYTES]] = middle
        child.edge, child.parent = child.edge[at:], middle
        middle.children[child.edge[:TOKEN_BYTES]] = child
        return middle


def _under(node: Node[Value], skip: Node[Value] | None) -> Iterator[Value]:
    """Values at or under a node, nearest first, leaving out one child's subtree."""
    level = [node]
    while level:
        for each in level:
            if each.value is not None:
                yield each.value
        level = [child for each in level for child in each.children.values() if child is not skip]
