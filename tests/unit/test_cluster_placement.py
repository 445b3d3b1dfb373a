"""Groups across failure domains, candidates for copies, stewards: pure, the same on every node."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tierfs.catalog.records import NodeRecord
from tierfs.cluster.placement import candidates, groups, partners, steward

KEY = ("run", "step_5")


def node(name: str, domain: str = "", free_bytes: int = 100, state: str = "serving") -> NodeRecord:
    return NodeRecord(name, ("h:1",), "t", domain=domain, free_bytes=free_bytes, state=state)


@st.composite
def clusters(draw: st.DrawFn) -> list[NodeRecord]:
    domains = draw(st.lists(st.sampled_from(["", "a", "b", "c", "d"]), max_size=24))
    return [node(f"n{at:02d}", domain) for at, domain in enumerate(domains)]


def label(each: NodeRecord) -> str:
    return each.domain or f"own {each.node}"


def can_be_apart(nodes: list[NodeRecord], sizes: list[int]) -> bool:
    """Gale and Ryser's condition: groups of these sizes with no two nodes of one domain in any."""
    domains = sorted(Counter(map(label, nodes)).values(), reverse=True)
    return all(sum(domains[:some]) <= sum(min(size, some) for size in sizes) for some in range(1, len(domains) + 1))


@given(nodes=clusters(), replicas=st.integers(1, 5), seed=st.integers(0, 99))
def test_groups_are_whole_apart_and_the_same_in_any_order(nodes: list[NodeRecord], replicas: int, seed: int) -> None:
    made = groups(nodes, replicas)
    assert sorted(name for group in made for name in group) == sorted(each.node for each in nodes)
    shuffled = list(nodes)
    random.Random(seed).shuffle(shuffled)
    assert groups(shuffled, replicas) == made
    if nodes and len(nodes) < replicas:
        assert len(made) == 1
    elif nodes:
        assert all(len(group) == replicas for group in made[:-1])
        assert replicas <= len(made[-1]) < 2 * replicas
    domain = {each.node: label(each) for each in nodes}
    if can_be_apart(nodes, [len(group) for group in made]):
        for group in made:
            assert len({domain[name] for name in group}) == len(group), made
    for each in nodes:
        mine = next(group for group in made if each.node in group)
        assert set(partners(each.node, nodes, replicas)) == set(mine) - {each.node}


def test_two_racks_make_pairs_across_them() -> None:
    nodes = [node(f"n{at}", "rack1" if at < 4 else "rack2") for at in range(8)]
    domain = {each.node: each.domain for each in nodes}
    assert all({domain[name] for name in pair} == {"rack1", "rack2"} for pair in groups(nodes, 2))


@given(nodes=clusters(), held=st.sets(st.integers(0, 23)), data=st.data())
def test_candidates_can_take_it_and_other_domains_come_first(
    nodes: list[NodeRecord], held: set[int], data: st.DataObject
) -> None:
    nodes = [
        node(
            each.node,
            each.domain,
            free_bytes=data.draw(st.integers(0, 20)),
            state=data.draw(st.sampled_from(["serving", "draining"])),
        )
        for each in nodes
    ]
    holders = {f"n{at:02d}" for at in held}
    found = candidates(KEY, "n00", nodes, holders, needed_bytes=10)
    able = {each.node for each in nodes if each.state == "serving" and each.free_bytes >= 10} - holders
    assert set(found) == able and len(found) == len(able)
    taken = {label(each) for each in nodes if each.node in holders}
    domain = {each.node: label(each) for each in nodes}
    same = [domain[name] in taken for name in found]
    assert same == sorted(same)
    assert found == candidates(KEY, "n00", nodes[::-1], holders, needed_bytes=10)


def test_a_node_that_joins_takes_over_few_and_only_for_itself() -> None:
    nodes = [node(f"n{at:02d}") for at in range(20)]
    keys = [("run", f"step_{at}") for at in range(400)]
    before = {key: (steward(key, nodes), candidates(key, "p", nodes, (), needed_bytes=0)[0]) for key in keys}
    more = [*nodes, node("new")]
    moved = 0
    for key in keys:
        after = steward(key, more), candidates(key, "p", more, (), needed_bytes=0)[0]
        for old, new in zip(before[key], after, strict=True):
            assert new in (old, "new")
            moved += new != old
    assert 10 <= moved <= 90, "a twenty-first of 800, about 38"
    spread = Counter(chosen for chosen, _ in before.values())
    assert len(spread) == 20 and max(spread.values()) < 60


def test_a_node_that_is_about_to_go_is_steward_only_where_all_are() -> None:
    draining, serving = node("a", state="draining"), node("b")
    assert {steward(("run", f"step_{at}"), [draining, serving]) for at in range(20)} == {"b"}
    assert steward(KEY, [draining]) == "a"
    assert steward(KEY, []) == ""
