"""Line charts as inline SVG: raw values thin, their moving mean on top, values under the pointer.

Only text comes out; colours and the hover are classes of the page's style sheet, so that one chart
serves light and dark and no script is needed. An axis starts at 0 where the data nearly reaches it,
else where the data does: the tick labels say so. Left out: logarithmic axes, zoom.
"""

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 540, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 22, 36
MOST_POINTS, MOST_COLUMNS = 400, 150  # drawn per line; under the pointer

Values = Sequence[float | None]


@dataclass(frozen=True)
class Series:
    """One line. Values of None or NaN leave a gap."""

    label: str  # shown at the pointer
    colour: str  # class name: "a" or "b"
    values: Values  # one per step
    smoothed: bool = True  # with a moving mean where there are enough steps
    dots: bool = False  # mark every value: few of them, far apart


def window_of(count: int) -> int:
    """Steps of the moving mean, odd; 1 (none) under 20 steps."""
    return 1 if count < 20 else min(101, count // 20 * 2 + 3)


def moving_mean(values: Values, window: int) -> list[float | None]:
    """Centred mean over `window` steps, over fewer at the ends; gaps count as absent."""
    sums, counts = [0.0], [0]
    for value in values:
        present = value if value is not None and math.isfinite(value) else None
        sums.append(sums[-1] + (present or 0.0))
        counts.append(counts[-1] + (present is not None))
    half, means = window // 2, []
    for at in range(len(values)):
        low, high = max(0, at - half), min(len(values), at + half + 1)
        count = counts[high] - counts[low]
        means.append((sums[high] - sums[low]) / count if count else None)
    return means


def nice_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers that cover [low, high] with steps of 1, 2 or 5 times a power of ten.

    Example: (0.31, 0.72) gives [0.3, 0.4, 0.5, 0.6, 0.7, 0.8].
    """
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [tick * step for tick in range(first, last + 1)]


def number(value: float, digits: int = 4) -> str:
    """At most `digits` significant digits below 1,000; no exponent between 0.001 and 1e6."""
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


@dataclass(frozen=True)
class _Frame:
    """Maps steps and values to the drawing."""

    steps: Sequence[int]
    ticks: Sequence[float]

    def x(self, step: float) -> float:
        span = self.steps[-1] - self.steps[0]
        share = (step - self.steps[0]) / span if span else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.ticks[0]) / (self.ticks[-1] - self.ticks[0])
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def chart(steps: Sequence[int], series: Sequence[Series], unit: str, label: str) -> str:
    """The SVG of one chart over ascending `steps`; `unit` names the vertical axis.

    At least one value must be finite.
    """
    found = [v for line in series for v in line.values if v is not None and math.isfinite(v)]
    assert found, f"nothing to draw in {label}"
    frame = _Frame(steps, nice_ticks(*_range(found)))
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{html.escape(label)}">',
        *_axes(frame, unit),
    ]
    window = window_of(len(steps))
    for line in series:
        means = moving_mean(line.values, window) if line.smoothed and window > 1 else None
        thin = "raw" if means else "line"
        parts.append(_path(frame, line.values, f"{thin} {line.colour}"))
        if means:
            parts.append(_path(frame, means, f"line {line.colour}"))
        if line.dots:
            parts += [_dot(frame.x(s), frame.y(v), line.colour) for s, v in _present(steps, line)]
    parts += _columns(frame, series)
    return "\n".join([*parts, "</svg>"])


def _range(found: Sequence[float]) -> tuple[float, float]:
    low, high = min(found), max(found)
    if 0 < low <= 0.5 * high:
        low = 0.0
    if 0.5 * low <= high < 0:
        high = 0.0
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        pad = 0.1 * abs(high) or 1.0
        low, high = low - pad, high + pad
    return low, high


def _axes(frame: _Frame, unit: str) -> Iterator[str]:
    right, floor = WIDTH - RIGHT, HEIGHT - BOTTOM
    for tick in frame.ticks:
        y = frame.y(tick)
        kind = "axis" if tick == frame.ticks[0] else "grid"
        yield f'<line class="{kind}" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 3.5:.1f}" text-anchor="end">{number(tick)}</text>'
    yield f'<text class="unit" x="{LEFT}" y="{TOP - 10}">{html.escape(unit)}</text>'
    first, last = frame.steps[0], frame.steps[-1]
    whole = nice_ticks(first, last, 6) if last > first else [float(first)]
    for step in whole:
        if first <= step <= last and step == int(step):
            x = frame.x(step)
            yield f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{floor}" y2="{floor + 4}"/>'
            yield f'<text x="{x:.1f}" y="{floor + 17}" text-anchor="middle">{int(step):,}</text>'
    middle = (LEFT + right) / 2
    yield f'<text class="unit" x="{middle}" y="{HEIGHT - 3}" text-anchor="middle">step</text>'


def _path(frame: _Frame, values: Values, classes: str) -> str:
    """A line broken at gaps; a value between two gaps becomes a dot."""
    moves, dots = [], []
    for piece in _pieces(frame.steps, values):
        spots = [(frame.x(step), frame.y(value)) for step, value in _thinned(piece)]
        if len(spots) == 1:
            dots.append(_dot(*spots[0], classes, 2.5))
        else:
            moves.append("M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in spots))
    line = f'<path class="{classes}" d="{"".join(moves)}"/>' if moves else ""
    return line + "".join(dots)


def _dot(x: float, y: float, classes: str, radius: float = 3.0) -> str:
    return f'<circle class="{classes}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>'


def _present(steps: Sequence[int], line: Series) -> list[tuple[int, float]]:
    return [point for piece in _pieces(steps, line.values) for point in piece]


def _pieces(steps: Sequence[int], values: Values) -> Iterator[list[tuple[int, float]]]:
    piece: list[tuple[int, float]] = []
    for step, value in zip(steps, values, strict=True):
        if value is not None and math.isfinite(value):
            piece.append((step, value))
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def thinning(count: int) -> int:
    """Steps of which a line of `count` points draws two; up to 2 it draws all."""
    return -(-count // (MOST_POINTS // 2))


def _thinned(piece: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Lowest and highest point of every bin, so that a spike survives."""
    size = thinning(len(piece))
    if size <= 2:
        return piece
    kept = []
    for start in range(0, len(piece), size):
        part = piece[start : start + size]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return kept


def _columns(frame: _Frame, series: Sequence[Series]) -> Iterator[str]:
    """Invisible columns that show a step's values while the pointer is over them."""
    count = len(frame.steps)
    stride = -(-count // MOST_COLUMNS)
    width = (WIDTH - LEFT - RIGHT) / max(1, -(-count // stride))
    for at in range(0, count, stride):
        x = frame.x(frame.steps[at])
        lines, dots = [f"step {frame.steps[at]:,}"], []
        for line in series:
            value = line.values[at]
            if value is None or not math.isfinite(value):
                lines.append(f"{line.label}: no value")
                continue
            lines.append(f"{line.label} {number(value)}")
            dots.append(_dot(x, frame.y(value), f"dot {line.colour}", 3.5))
        yield (
            f'<g class="hit"><rect x="{x - width / 2:.1f}" y="{TOP}" width="{width:.2f}" '
            f'height="{HEIGHT - TOP - BOTTOM}"/><g class="tip"><line x1="{x:.1f}" x2="{x:.1f}" '
            f'y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>{"".join(dots)}{_tip(x, lines)}</g></g>'
        )


def _tip(x: float, lines: Sequence[str]) -> str:
    """The box beside the pointer, on the side with more room."""
    width = 14 + 6.4 * max(map(len, lines))
    left = x + 8 if x < (LEFT + WIDTH - RIGHT) / 2 else x - 8 - width
    rows = "".join(
        f'<text x="{left + 7:.1f}" y="{TOP + 17 + 15 * row}">{html.escape(line)}</text>'
        for row, line in enumerate(lines)
    )
    height = 11 + 15 * len(lines)
    box = f'<rect x="{left:.1f}" y="{TOP + 2}" width="{width:.1f}" height="{height}" rx="4"/>'
    return box + rows
