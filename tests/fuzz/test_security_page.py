"""What docs/security.md says is held by tests: each one that it names exists."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "security.md").read_text("utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_every_test_named_exists(path: str, name: str) -> None:
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_point_names_a_test() -> None:
    points = re.findall(r"^- (.*?)(?=^- |^$|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert len(points) >= 10
    assert all("::test_" in point for point in points)
