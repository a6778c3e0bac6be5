"""A picture of a predicted step: what each lane does, and what compute waits for. Drawn by matplotlib."""

from pathlib import Path

from laconic.plan.estimates import Estimate
from laconic.plan.machine import PlanLane

SUFFIXES = (".png", ".svg", ".pdf")
"""The endings of file names that `draw_timeline` accepts."""
_COLOURS = {
    PlanLane.COMPUTE: "#56b4e9", PlanLane.WIRE: "#d55e00", PlanLane.LOCAL: "#e69f00", PlanLane.TO_HOST: "#009e73",
    PlanLane.TO_DEVICE: "#7fc8ac", PlanLane.HOST: "#999999",
}  # fmt: skip
"""After the palette of Okabe and Ito."""
_MAX_LABELLED = 60
"""The most spans of a lane that get their names."""


def draw_timeline(estimate: Estimate, path: Path) -> None:
    """Write a picture of the step of an estimate that kept its spans.

    Raises:
        ModuleNotFoundError: matplotlib is missing.
    """
    from matplotlib.figure import Figure  # not pyplot, which would look for a display
    from matplotlib.patches import Patch

    lanes = [lane for lane in PlanLane if any(span.lane is lane for span in estimate.spans)]
    figure = Figure(figsize=(11, 1.5 + 0.6 * len(lanes)), layout="constrained", dpi=120)
    axes = figure.subplots()
    for row, lane in enumerate(lanes):
        work = [span for span in estimate.spans if span.lane is lane and not span.is_wait]
        for span in work:
            begin_s = span.begin_s - estimate.begin_s
            axes.barh(row, span.end_s - span.begin_s, left=begin_s, height=0.7, color=_COLOURS[lane], edgecolor="white",
                      linewidth=0.3)  # fmt: skip
            is_wide = span.end_s - span.begin_s > 0.05 * estimate.seconds
            if is_wide and len(work) <= _MAX_LABELLED:
                middle_s = begin_s + (span.end_s - span.begin_s) / 2
                axes.text(middle_s, row, span.name, ha="center", va="center", fontsize=6, clip_on=True)
    row = lanes.index(PlanLane.COMPUTE)
    for span in estimate.spans:
        if span.is_wait:
            axes.barh(row, span.end_s - span.begin_s, left=span.begin_s - estimate.begin_s, height=0.7, fill=False,
                      edgecolor=_COLOURS[span.lane], linewidth=0.6, hatch="////")  # fmt: skip
    waited = [lane for lane in lanes if estimate.waits_s.get(lane)]
    legend = [
        Patch(
            fill=False,
            edgecolor=_COLOURS[lane],
            hatch="////",
            label=f"waits {estimate.waits_s[lane]:.3g} s: {lane.value}",
        )
        for lane in waited
    ]
    if legend:
        axes.legend(handles=legend, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=4, frameon=False)
    axes.set_yticks(range(len(lanes)), [lane.value for lane in lanes], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, estimate.seconds)
    axes.set_xlabel("seconds", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{estimate.label}: a step of {estimate.seconds:.3g} s, predicted", fontsize=9, loc="left")
    figure.savefig(path)
