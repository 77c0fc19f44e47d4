"""Pictures of plans: every task and every need is in them, nothing overlaps, no text of a document gets out of its place."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from perdure.workflow import graph
from perdure.workflow.dsl import Workflow
from perdure.workflow.plan import Plan
from support.flows import flow

HERE = Path(__file__).parent
SVG = "{http://www.w3.org/2000/svg}"
ODD = 'a"b<c>&d#`e'


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Workflow.load(HERE / "golden" / "everything.yaml").compile()


def odd() -> Plan:
    made = Workflow("<title>&")
    made.task("a", made.action(ODD + "\n\x01", "builtin.assign"))
    return made.compile()


def edges(plan: Plan) -> int:
    return sum(len(task.needs) for task in plan.tasks.values())


def test_mermaid_has_every_task_and_every_need(plan: Plan) -> None:
    lines = graph.mermaid(plan).splitlines()
    assert lines[0] == "flowchart TD"
    nodes = [line for line in lines if re.match(r"  t\d+[\[({]", line)]
    assert len(nodes) == len(plan.order)
    arrows = [re.fullmatch(r'  t(\d+) (-->|-\.->)(\|"[^"]*"\|)? t(\d+)', line) for line in lines[1 + len(nodes) :]]
    assert len(arrows) == edges(plan)
    found = {(plan.order[int(one[1])], plan.order[int(one[4])]) for one in arrows if one}
    assert found == {(need, id) for id, task in plan.tasks.items() for need in task.needs}


def test_mermaid_says_what_a_router_decides_by_and_what_is_conditional() -> None:
    plan = flow(
        """
        actions: {set: {kind: builtin.assign}}
        tasks:
          - {id: r, uses: router, route: {select: "${{ inputs.x }}", cases: [{equals: yes, tasks: [a]}, {equals: 1, tasks: [b]}], default: [c]}}
          - {id: a, uses: "action:set", needs: [r]}
          - {id: b, uses: "action:set", needs: [r], when: inputs.y}
          - {id: c, uses: "action:set", needs: [r]}
        """,
        HERE,
    ).compile()
    text = graph.mermaid(plan, {"a": "succeeded", "b": "skipped", "c": "pending", "gone": "failed"})
    assert '  t0{{"r<br/>router"}}' in text
    assert '  t0 -->|"yes"| t1' in text
    assert '  t0 -.->|"1"| t2' in text
    assert '  t0 -->|"default"| t3' in text
    assert re.findall(r"style (t\d+) fill:(#\w+)", text) == [("t1", "#2e7d32"), ("t2", "#9e9e9e")]


def test_text_of_a_document_means_nothing_to_mermaid() -> None:
    [node] = [line for line in graph.mermaid(odd()).splitlines() if line.startswith("  t0")]
    assert node == '  t0["a<br/>action:a#34;b#60;c#62;#38;d#35;#96;e  "]'


def boxes(root: ET.Element) -> dict[str, tuple[float, float, float, float]]:
    found = {}
    for group in root.iter(f"{SVG}g"):
        box, text = group.find(f"{SVG}rect"), group.find(f"{SVG}text")
        assert box is not None
        assert text is not None
        x, y, width, height = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        found[str(text.text)] = (x, y, x + width, y + height)
    return found


@pytest.mark.parametrize("name", ["golden/everything.yaml", "good/nightly.yaml"])
def test_svg_has_every_task_once_inside_the_picture_and_over_nothing(name: str) -> None:
    plan = Workflow.load(HERE / name).compile()
    root = ET.fromstring(graph.svg(plan))
    found = boxes(root)
    assert found.keys() == plan.tasks.keys()
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    placed = list(found.values())
    for index, (left, top, right, bottom) in enumerate(placed):
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height
        for other in placed[index + 1 :]:
            assert right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top
    for id, task in plan.tasks.items():
        for need in task.needs:
            assert found[need][3] < found[id][1], "what is needed stands above"
    assert len([path for path in root.iter(f"{SVG}path") if "marker-end" in path.attrib]) == edges(plan)


def test_svg_is_xml_whatever_the_document_says_and_colours_states() -> None:
    text = graph.svg(odd(), {"a": "failed"})
    root = ET.fromstring(text)
    assert [one.text for one in root.iter(f"{SVG}text")] == ["a", f"action:{ODD}  "]
    assert root.findtext(f"{SVG}title") == "<title>&"
    [box] = list(root.iter(f"{SVG}rect"))
    assert box.attrib["fill"] == "#c62828"


def test_a_picture_is_the_same_each_time(plan: Plan) -> None:
    assert graph.svg(plan) == graph.svg(plan)
    assert graph.mermaid(plan) == graph.mermaid(plan)
