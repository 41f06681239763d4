"""The style of the HTML report: on a phone, on a desk, in the dark and on paper."""

STYLE = """
:root { color-scheme: light dark;
  --page: #f6f7f9; --card: #fff; --ink: #1b2027; --soft: #5a6472; --rule: #e1e5ea; --code: #eef1f4;
  --pass: #157347; --fail: #bb2d3b; --open: #8a6100; --note: #2563a8; --tint: #bb2d3b14; --noise: #8b95a31f;
  --s1: #0b7285; --s2: #d9480f; --s3: #6741d9; --s4: #2b8a3e; --s5: #a61e4d; --s6: #846358; }
@media (prefers-color-scheme: dark) { :root {
  --page: #12161b; --card: #1a2027; --ink: #e6eaef; --soft: #9aa5b3; --rule: #2c343d; --code: #252d36;
  --pass: #51cf8a; --fail: #ff7b86; --open: #f0b94d; --note: #74b3f5; --tint: #ff7b8626; --noise: #9aa5b32b;
  --s1: #4dc9dc; --s2: #ff9454; --s3: #b197fc; --s4: #69db7c; --s5: #f783ac; --s6: #c9a99b; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 48px; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 36px 0 12px; }
h3 { font-size: 1rem; margin: 0; overflow-wrap: anywhere; }
p { margin: 6px 0; }
figcaption { margin-top: 6px; }
.soft, figcaption, summary .soft { color: var(--soft); font-size: .875rem; }
code { font: .84em/1.45 ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace;
  background: var(--code); border-radius: 4px; padding: .1em .35em; overflow-wrap: anywhere; }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 16px 18px; }
.verdict { display: flex; flex-wrap: wrap; align-items: center; gap: 8px 14px; margin: 14px 0 4px; font-size: 1.05rem; }
.badge { font-weight: 700; letter-spacing: .04em; border-radius: 6px; padding: 3px 12px; color: #fff;
  background: var(--badge); }
@media (prefers-color-scheme: dark) { .badge { color: #12161b; } }
.pass { --badge: var(--pass); } .fail { --badge: var(--fail); } .inconclusive { --badge: var(--open); }
.finding { border-left: 5px solid var(--level); margin: 0 0 12px; }
.error { --level: var(--fail); } .warning { --level: var(--open); } .note { --level: var(--note); }
.known { --level: var(--rule); }
.head { display: flex; flex-wrap: wrap; align-items: baseline; gap: 2px 12px; }
.level { color: var(--level); font-weight: 700; text-transform: uppercase; font-size: .8rem; letter-spacing: .05em; }
.known .level { color: var(--soft); }
.item + .item { border-top: 1px solid var(--rule); margin-top: 10px; padding-top: 6px; }
.tensors { margin: 6px 0; padding-left: 20px; }
.fix { margin-top: 12px; border-left: 3px solid var(--pass); padding-left: 10px; }
.fix b { color: var(--pass); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 16px; }
figure { margin: 0; break-inside: avoid; }
figure svg:not(.key) { display: block; width: 100%; height: auto; margin-top: 8px; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 18px; padding: 0; margin: 8px 0 0;
  font-size: .875rem; }
.key { width: 22px; height: 8px; margin-right: 7px; vertical-align: middle; }
svg text { fill: var(--soft); font-size: 12.5px; font-family: inherit; }
.grid { stroke: var(--rule); } .floor { stroke: var(--soft); }
.noise { fill: var(--noise); } .marked { fill: var(--tint); stroke: var(--fail); stroke-width: .6; }
.reference { stroke: var(--note); stroke-width: 1.5; stroke-dasharray: 5 4; }
.line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; }
.dot { fill: var(--c); } .band { fill: var(--c); opacity: .13; }
.s1 { --c: var(--s1); } .s2 { --c: var(--s2); } .s3 { --c: var(--s3); }
.s4 { --c: var(--s4); } .s5 { --c: var(--s5); } .s6 { --c: var(--s6); }
details { margin: 10px 0; }
summary { cursor: pointer; font-weight: 600; overflow-wrap: anywhere; }
.item details { margin: 6px 0 2px; } .item summary { font-weight: 400; font-size: .9rem; }
details ul { padding-left: 20px; margin: 8px 0; }
.rules { columns: 260px; list-style: none; padding: 0; font-size: .9rem; }
.rules li { break-inside: avoid; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { text-align: right; padding: 4px 10px; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
th:last-child, td:last-child { text-align: left; }
td.swapped { color: var(--fail); font-weight: 700; } td.as-named { color: var(--pass); }
footer { margin-top: 36px; color: var(--soft); font-size: .8rem; }
@media (max-width: 640px) {
  main { padding: 18px 12px 32px; } .card { padding: 12px 13px; }
  svg text { font-size: 18px; } .line { stroke-width: 2.6; } }
@media print {
  :root { font-size: 11px; color-scheme: light; --page: #fff; --card: #fff; --ink: #000; --soft: #444; --rule: #bbb;
    --code: #f1f1f1;
    --pass: #157347; --fail: #bb2d3b; --open: #8a6100; --note: #2563a8; --tint: #bb2d3b14; --noise: #8b95a31f;
    --s1: #0b7285; --s2: #d9480f; --s3: #6741d9; --s4: #2b8a3e; --s5: #a61e4d; --s6: #846358; }
  body { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  main { max-width: none; padding: 0; } .card { break-inside: avoid; } .badge { color: #fff; }
  .charts { grid-template-columns: 1fr 1fr; gap: 10px; } .scroll { overflow: visible; }
  th, td { padding: 1px 4px; white-space: normal; }
  details::details-content { content-visibility: visible; block-size: auto; } }
"""
