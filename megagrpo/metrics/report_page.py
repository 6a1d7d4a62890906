"""The page that `report_html` fills: style sheet and frame, with a place {{name}} per part.

Both themes come from one set of colour names. The policy in the head forbids the page to load or
run anything, so that text that got past the escaping could still do nothing.
"""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{{title}} - megagrpo</title>
<style>
:root {
  color-scheme: light dark;
  --page: #f6f5f2; --card: #ffffff; --ink: #1d1d1b; --soft: #6a6963; --line: #e4e2dc;
  --a: #2563c9; --b: #b8540f; --bad: #b3261e; --good: #2c7a4b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #121316; --card: #1b1d21; --ink: #eae8e3; --soft: #9b9a94; --line: #2f3238;
    --a: #7aa8f7; --b: #f0a35e; --bad: #f28b82; --good: #7fc99a;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 40px 24px 64px; max-width: 1180px; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
h1 { font-size: 28px; line-height: 1.2; margin: 0; letter-spacing: -0.01em; }
h2 { font-size: 16px; margin: 0; font-weight: 600; }
h2.part { font-size: 19px; margin: 44px 0 12px; }
p { margin: 0; }
.what, .sub, .tile p, .empty { color: var(--soft); }
.sub { margin-top: 6px; overflow-wrap: anywhere; }
.tiles { display: grid; gap: 12px; margin: 28px 0 12px;
  grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); }
.tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 14px 16px; }
.tile h2 { font-size: 13px; color: var(--soft); font-weight: 500; overflow-wrap: anywhere; }
.tile .big { font-size: 21px; font-weight: 650; margin: 2px 0; color: var(--ink);
  font-variant-numeric: tabular-nums; white-space: nowrap; }
.tile .big span { color: var(--soft); font-weight: 450; font-size: 16px; }
.tile p { font-size: 12px; }
.cards { display: grid; gap: 12px;
  grid-template-columns: repeat(auto-fit, minmax(min(460px, 100%), 1fr)); }
.card { padding: 16px 18px 10px; min-width: 0; }
.card .what { font-size: 13px; }
.keys { font-size: 12px; min-height: 20px; margin: 6px 0 2px; color: var(--soft);
  display: flex; gap: 2px 16px; flex-wrap: wrap; }
.key::before { content: ""; display: inline-block; width: 16px; height: 3px; border-radius: 2px;
  margin: 0 7px 3px 0; background: currentColor; }
.key.a { color: var(--a); } .key.b { color: var(--b); }
.empty { padding: 40px 12px; text-align: center; max-width: 46ch; margin: 0 auto; }
svg.chart { display: block; width: 100%; height: auto; font-size: 11px; }
.chart text { fill: var(--soft); font-variant-numeric: tabular-nums; }
.chart .unit { font-size: 11px; font-style: italic; }
.chart .grid { stroke: var(--line); } .chart .axis { stroke: var(--soft); stroke-opacity: .6; }
.chart path { fill: none; stroke-linejoin: round; stroke-linecap: round; }
.chart .raw { stroke-width: 1; stroke-opacity: .38; } .chart .line { stroke-width: 2.2; }
.chart path.a { stroke: var(--a); } .chart path.b { stroke: var(--b); }
.chart circle.a { fill: var(--a); } .chart circle.b { fill: var(--b); }
.hit > rect { fill: transparent; } .tip { visibility: hidden; pointer-events: none; }
.hit:hover .tip { visibility: visible; }
.tip line { stroke: var(--soft); stroke-dasharray: 2 3; }
.tip rect { fill: var(--card); stroke: var(--line); } .chart .tip text { fill: var(--ink); }
.tip .dot { stroke: var(--card); stroke-width: 1.5; }
ul.health { list-style: none; margin: 12px 0 8px; padding: 0; font-size: 14px; }
.health li { padding: 3px 0 3px 22px; position: relative; overflow-wrap: anywhere; }
.health li::before { content: "\\2022"; position: absolute; left: 4px; color: var(--soft); }
.health .good::before { content: "\\2713"; color: var(--good); }
.health .bad { color: var(--bad); }
.health .bad::before { content: "!"; left: 7px; color: var(--bad); font-weight: 700; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: left; vertical-align: top; padding: 6px 14px 6px 0;
  border-top: 1px solid var(--line); }
thead th { border-top: 0; color: var(--soft); font-weight: 500; }
tbody th { font-weight: 500; white-space: nowrap; } td { overflow-wrap: anywhere; }
td.number, th.number { font-variant-numeric: tabular-nums; white-space: nowrap; text-align: right; }
.meanings td.number { padding-left: 10px; }
.meanings td:last-child { color: var(--soft); min-width: 260px; }
pre { margin: 0; font: 12.5px/1.45 ui-monospace, "SF Mono", Menlo, Consolas, monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; }
details { margin-top: 28px; } summary { cursor: pointer; font-size: 19px; font-weight: 600; }
details table { margin-top: 12px; }
footer { margin-top: 48px; color: var(--soft); font-size: 12px; }
@media print { body { background: none; } .tile, .card { break-inside: avoid; } }
</style>
</head>
<body>
<header><h1>{{title}}</h1><p class="sub">{{subtitle}}</p></header>
<div class="tiles">{{tiles}}</div>
<div class="cards">{{cards}}
<section class="card"><h2>What went wrong</h2>
<p class="what">as far as it was measured</p><ul class="health">{{health}}</ul></section>
</div>
<h2 class="part">Completions</h2>
{{samples}}
<details open><summary>Numbers</summary><div class="wide"><table class="meanings">
<thead><tr><th>metric</th><th class="number">first steps</th><th class="number">last steps</th>
<th class="number">last</th><th>formula / denominator</th></tr></thead>
<tbody>{{numbers}}</tbody></table></div></details>
<details><summary>Config</summary><div class="wide"><table>
<tbody>{{config}}</tbody></table></div></details>
<footer>From metrics.jsonl, config.yaml and the newest file in rollouts/.</footer>
</body>
</html>
"""
