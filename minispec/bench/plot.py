"""Pictures of a benchmark report (needs the extra ``plot``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minispec.errors import ConfigError


def check_plot(path: Path) -> None:
    """Whether a picture can be drawn there, before anything is measured.

    Raises:
        ConfigError: matplotlib is missing, does not know the suffix, or the folder does not exist.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'minispec[plot]'") from None
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise ConfigError(f"--plot cannot draw {path.name!r}; end the name in one of .{', .'.join(sorted(known))}")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}")


def draw(report: dict[str, Any], path: Path) -> None:
    """Speed-up and acceptance by category, and what else the report holds: sweeps, profile."""
    from matplotlib.figure import Figure

    levels = report.get("sweep") or [report]
    panels = [lambda axes: _categories(axes, levels[0])]
    if len(levels) > 1:
        panels.append(lambda axes: _concurrency(axes, levels, report["draft"]))
    if steps := report.get("context_sweep", {}).get("step_ms"):
        panels.append(lambda axes: _line(axes, steps, "tokens of context", "ms per step"))
    if prefill := report.get("prefill", {}).get("ttft_ms"):
        panels.append(lambda axes: _line(axes, prefill, "prompt tokens", "ms to the first token"))
    if profile := report.get("profile"):
        panels.append(lambda axes: _profile(axes, profile))
    figure = Figure(figsize=(5.5 * len(panels), 4.2), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        panel(axes)
    figure.suptitle(f"{report['target']} with {report['draft']} on {report['machine']['name']}")
    figure.savefig(path, dpi=120)


def _categories(axes: Any, report: dict[str, Any]) -> None:
    rows = {**report["categories"], "all": report}
    names = list(rows)
    speedup = [row["speedup"] for row in rows.values()]
    error = [
        [row["speedup"] - row["speedup_q1"] for row in rows.values()],
        [row["speedup_q3"] - row["speedup"] for row in rows.values()],
    ]
    axes.bar(names, speedup, yerr=error, capsize=4, color="tab:blue", label="speed-up (quartiles)")
    axes.plot(names, [row["acceptance_length"] for row in rows.values()], "o", color="tab:orange", label="acceptance")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_ylabel("x without speculation; tokens per verification")
    axes.legend()


def _concurrency(axes: Any, levels: list[dict[str, Any]], draft: str) -> None:
    streams = [level["concurrency"] for level in levels]
    axes.plot(streams, [level["tokens_per_s"] for level in levels], "o-", label=f"with {draft}")
    axes.plot(streams, [level["baseline_tokens_per_s"] for level in levels], "o-", label="without")
    axes.set(xlabel="streams", ylabel="tokens per second in all", ylim=(0, None))
    axes.legend()


def _line(axes: Any, values: dict[str, float], xlabel: str, ylabel: str) -> None:
    axes.plot([int(x) for x in values], list(values.values()), "o-")
    axes.set(xlabel=xlabel, ylabel=ylabel, ylim=(0, None))


def _profile(axes: Any, profile: dict[str, Any]) -> None:
    parts = {part: ms for part, ms in profile["parts_ms"].items() if ms > 0}
    axes.barh(list(parts), list(parts.values()))
    axes.invert_yaxis()
    axes.set(xlabel="ms per step", title=f"a step of {profile['step_ms']:.1f} ms")
