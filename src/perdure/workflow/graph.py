"""A plan as a picture: Mermaid text, or an SVG of layers drawn here."""

from __future__ import annotations

from collections.abc import Mapping
from xml.sax.saxutils import escape

import msgspec

from perdure.workflow.plan import Plan

_SHAPES = {"agent": ("([", "])"), "router": ("{{", "}}"), "aggregate": ("[[", "]]"), "loop": ("[[", "]]")}
_COLORS = {
    "succeeded": "#2e7d32", "failed": "#c62828", "skipped": "#9e9e9e", "cancelled": "#9e9e9e", "running": "#1565c0",
    "waiting_for_approval": "#ef6c00", "waiting_for_effect": "#ef6c00", "waiting": "#1565c0", "retry_scheduled": "#1565c0",
}  # fmt: skip
_LABEL_CHARS_MAX = 200
_BOX_HEIGHT, _GAP_X, _GAP_Y, _CHAR, _PAD = 36, 36, 56, 7.2, 24


def mermaid(plan: Plan, states: Mapping[str, str] | None = None) -> str:
    """The graph as Mermaid; ``states`` colours the tasks of a run."""
    names = {id: f"t{place}" for place, id in enumerate(plan.order)}
    lines = ["flowchart TD"]
    for id in plan.order:
        left, right = _SHAPES.get(plan.tasks[id].kind, ("[", "]"))
        lines.append(f'  {names[id]}{left}"{_quoted(id)}<br/>{_quoted(plan.tasks[id].uses)}"{right}')
    cases = _cases(plan)
    for id in plan.order:
        arrow = "-.->" if plan.tasks[id].when is not None else "-->"
        for need in plan.tasks[id].needs:
            case = cases.get((need, id))
            label = "" if case is None else f'|"{_quoted(case)}"|'
            lines.append(f"  {names[need]} {arrow}{label} {names[id]}")
    for id, state in (states or {}).items():
        if state in _COLORS and id in names:
            lines.append(f"  style {names[id]} fill:{_COLORS[state]},color:#fff")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Text inside quotes of Mermaid: no character of it means anything."""
    shown = "".join(char if char.isprintable() else " " for char in text[:_LABEL_CHARS_MAX])
    return "".join(f"#{ord(char)};" if char in '"#&<>`' else char for char in shown)


def _cases(plan: Plan) -> dict[tuple[str, str], str]:
    """Router and destination to the value that leads there."""
    found = {}
    for id, task in plan.tasks.items():
        if task.route is not None:
            for case in task.route.cases:
                shown = case.equals if isinstance(case.equals, str) else msgspec.json.encode(case.equals).decode()
                found.update({(id, destination): shown for destination in case.tasks})
            found.update({(id, destination): "default" for destination in task.route.default})
    return found


def _text(text: str) -> str:
    """Text of an SVG: what XML cannot hold is left out."""
    return escape("".join(char if char.isprintable() else " " for char in text))


def _layers(plan: Plan) -> list[list[str]]:
    depth: dict[str, int] = {}
    for id in plan.order:
        depth[id] = 1 + max((depth[need] for need in plan.tasks[id].needs), default=-1)
    found: list[list[str]] = [[] for _ in range(max(depth.values()) + 1)]
    for id in plan.order:
        found[depth[id]].append(id)
    place: dict[str, float] = {}
    for layer in found:  # each near the middle of what it needs, so that lines cross less

        def middle(id: str) -> float:
            needs = plan.tasks[id].needs
            return sum(place[need] for need in needs) / len(needs) if needs else 0.0

        layer.sort(key=middle)
        place.update({id: index - len(layer) / 2 for index, id in enumerate(layer)})
    return found


def svg(plan: Plan, states: Mapping[str, str] | None = None) -> str:
    """The graph as an SVG image."""
    layers = _layers(plan)
    widths = {id: max(len(id), len(plan.tasks[id].uses)) * _CHAR + _PAD for id in plan.order}
    spans = [sum(widths[id] for id in layer) + _GAP_X * (len(layer) - 1) for layer in layers]
    width, height = max(spans) + 2 * _PAD, len(layers) * (_BOX_HEIGHT + _GAP_Y) - _GAP_Y + 2 * _PAD
    boxes: dict[str, tuple[float, float]] = {}
    for number, layer in enumerate(layers):
        x = (width - spans[number]) / 2
        for id in layer:
            boxes[id] = (x, _PAD + number * (_BOX_HEIGHT + _GAP_Y))
            x += widths[id] + _GAP_X
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="monospace" font-size="12">'
        ),
        f"<title>{_text(plan.name)}</title>",
        (
            '<defs><marker id="a" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            '<path d="M0 0L8 4L0 8z" fill="#607d8b"/></marker></defs>'
        ),
    ]
    for id in plan.order:
        for need in plan.tasks[id].needs:
            (x1, y1), (x2, y2) = boxes[need], boxes[id]
            x1, y1, x2 = x1 + widths[need] / 2, y1 + _BOX_HEIGHT, x2 + widths[id] / 2
            bend = (y1 + y2) / 2
            dash = ' stroke-dasharray="4 3"' if plan.tasks[id].when is not None else ""
            parts.append(
                f'<path d="M{x1:.1f} {y1:.1f}C{x1:.1f} {bend:.1f} {x2:.1f} {bend:.1f} {x2:.1f} {y2:.1f}" fill="none" '
                f'stroke="#607d8b" marker-end="url(#a)"{dash}/>'
            )
    for id, (x, y) in boxes.items():
        state = (states or {}).get(id, "")
        fill, ink = _COLORS.get(state, "#eceff1"), "#fff" if state in _COLORS else "#263238"
        told = f"{id}: {state or plan.tasks[id].kind}"
        parts.append(
            f'<g><title>{_text(told)}</title><rect x="{x:.1f}" y="{y}" width="{widths[id]:.1f}" height="{_BOX_HEIGHT}" '
            f'rx="{_BOX_HEIGHT / 2 if plan.tasks[id].kind == "agent" else 4}" fill="{fill}" stroke="#607d8b"/>'
            f'<text x="{x + widths[id] / 2:.1f}" y="{y + 15}" text-anchor="middle" fill="{ink}">{_text(id)}</text>'
            f'<text x="{x + widths[id] / 2:.1f}" y="{y + 29}" text-anchor="middle" fill="{ink}" font-size="10">'
            f"{_text(plan.tasks[id].uses)}</text></g>"
        )
    return "\n".join([*parts, "</svg>"]) + "\n"
