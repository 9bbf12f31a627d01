"""The page's style sheet and script. No fonts, pictures or code from elsewhere: it must open from a memory stick."""

STYLE = """
:root{--paper:#fff;--ink:#1b1f24;--soft:#5d6671;--line:#e3e6ea;--wash:#f5f6f8;--right:#2f74d0;--wrong:#e06a0c;
 --train:#2f74d0;--val:#d1600a;--rate:#6b7480;--on:#fff;color-scheme:light dark}
@media screen and (prefers-color-scheme:dark){:root{--paper:#14171b;--ink:#e6e9ed;--soft:#98a2ae;--line:#2b3138;
 --wash:#1c2025;--right:#4b90ea;--wrong:#f08a35;--train:#6aa6f2;--val:#f39a4f;--rate:#98a2ae}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
 font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,"Noto Sans","DejaVu Sans",sans-serif}
main{max-width:1080px;margin:0 auto;padding:40px 24px 72px}
h1{font-size:1.9rem;line-height:1.2;margin:2px 0 26px;overflow-wrap:anywhere}
h2{font-size:1.25rem;margin:52px 0 4px;padding-top:18px;border-top:1px solid var(--line)}
h3{font-size:1rem;margin:0 0 6px}
h3 small{font-weight:400;color:var(--soft);font-size:.85rem;margin-left:.5em}
p{margin:0 0 12px}
.kind,.lead,figure>p,footer{color:var(--soft)}
.kind{margin:0;font-size:.9rem}
.lead{max-width:46em;margin-bottom:18px}
figure{margin:0}
.aside{display:none}
@media(max-width:720px){figure>p.aside{display:block}}
figure>p{font-size:.875rem;margin:8px 0 0;max-width:46em}
figure.confusion>p{contain:inline-size}
.hero{display:grid;grid-template-columns:auto 1fr;gap:10px 36px;align-items:center;background:var(--wash);
 border-radius:12px;padding:24px 28px}
.hero .big{font-size:4.2rem;line-height:1;font-weight:650;letter-spacing:-.02em;font-variant-numeric:tabular-nums}
.hero p{margin:0 0 4px;overflow-wrap:anywhere}
.hero .soft{color:var(--soft);font-size:.925rem}
.scale{grid-column:1/-1;position:relative;height:34px;margin-top:10px;font-size:.8rem;color:var(--soft)}
.scale i,.scale s,.scale u,.scale b{position:absolute;text-decoration:none}
.scale i{left:0;right:0;top:5px;height:4px;border-radius:2px;background:var(--line)}
.scale s{top:2px;height:10px;border-radius:5px;background:var(--right);opacity:.4;min-width:3px}
.scale b{top:0;width:3px;height:14px;margin-left:-1.5px;border-radius:1.5px;background:var(--right)}
.scale u{top:1px;width:2px;height:12px;margin-left:-1px;background:var(--soft)}
.scale span{position:absolute;top:15px;white-space:nowrap}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:12px 0 26px}
.tiles div{background:var(--wash);border-radius:10px;padding:12px 16px}
.tiles b{display:block;font-size:1.35rem;font-variant-numeric:tabular-nums}
.tiles span{color:var(--soft);font-size:.875rem}
table{border-collapse:collapse;width:100%}
th{text-align:left;font-weight:500;color:var(--soft)}
td,th{padding:6px 16px 6px 0;vertical-align:top;border-bottom:1px solid var(--line);overflow-wrap:anywhere}
.facts th{width:11em;white-space:nowrap;overflow-wrap:normal}
.list{font-size:.94rem}
.list td,.list th{vertical-align:middle;overflow-wrap:break-word}
.list .number{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
.list .number,.list .bar{width:1%}
.list .bar>div{width:clamp(70px,22vw,240px)}
.beside{display:flex;flex-wrap:wrap;gap:24px 44px;align-items:flex-start;margin-top:18px}
.beside>*{min-width:0;max-width:100%}
.beside>.pairs{flex:1 1 480px}
.pairs .bar>div{width:clamp(50px,11vw,110px)}
.bar div{position:relative;height:12px;background:var(--wash);border-radius:3px}
.bar i{position:absolute;left:0;top:0;bottom:0;border-radius:3px}
.bar i.right{background:var(--right)}.bar i.wrong{background:var(--wrong)}
.bar s{position:absolute;top:5px;height:2px;background:var(--ink);opacity:.75}
.classes{max-width:760px}
.curves{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:30px 28px;margin-top:18px}
.curve{position:relative}
svg{display:block}
.curve svg{width:100%;height:auto;touch-action:pan-y}
svg text{font-size:12px;fill:var(--soft)}
svg .grid{stroke:var(--line)}
svg path{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
svg path.train{stroke:var(--train)}svg path.val{stroke:var(--val)}svg path.rate{stroke:var(--rate)}
svg path.raw{stroke-width:1;opacity:.28}
svg .dot.train{fill:var(--train)}svg .dot.val{fill:var(--val)}svg .dot.rate{fill:var(--rate)}
svg text.name{font-weight:600}
svg text.name.train{fill:var(--train)}svg text.name.val{fill:var(--val)}
svg .cursor{stroke:var(--soft);stroke-dasharray:2 3;visibility:hidden}
.tip{position:absolute;pointer-events:none;visibility:hidden;background:var(--ink);color:var(--paper);font-size:.8rem;
 line-height:1.4;padding:5px 9px;border-radius:6px;white-space:pre;font-variant-numeric:tabular-nums}
.scroll{overflow-x:auto}
.drawn img{display:block;max-width:100%;height:auto}
@media (max-width:700px){.drawn img.wide{max-width:none;width:760px}}
.map.fits{max-width:100%;height:auto}
.map rect.right{fill:var(--right)}.map rect.wrong{fill:var(--wrong)}
.map .frame{fill:var(--wash)}
.map text{fill:var(--ink)}
.map .times{font-size:11.5px;pointer-events:none}.map .times.on{fill:var(--on);font-weight:600}
.map g:hover>rect{stroke:var(--ink);stroke-width:1.5}
.dots{display:block;width:440px;max-width:100%;background:var(--wash);image-rendering:pixelated}
.mistakes{display:grid;grid-template-columns:repeat(auto-fill,minmax(148px,1fr));gap:20px 16px}
.mistakes div{aspect-ratio:1;background:var(--wash);border-radius:8px;overflow:hidden;margin-bottom:6px}
.mistakes img{width:100%;height:100%;object-fit:contain;display:block}
.crisp{image-rendering:pixelated}
.mistakes p{margin:0;color:var(--ink);font-size:.875rem;line-height:1.4;overflow-wrap:anywhere}
.mistakes .said{color:var(--wrong)}
.mistakes .file{color:var(--soft);font-size:.78rem}
pre{background:var(--wash);border-radius:8px;padding:12px 16px;overflow-x:auto;font-size:.875rem;line-height:1.55}
code,pre{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
pre i{color:var(--soft);font-style:normal}
summary{cursor:pointer;padding:8px 0;color:var(--soft)}
ul{margin:8px 0;padding-left:1.2em;overflow-wrap:anywhere}
footer{margin-top:52px;font-size:.875rem}
@media (max-width:600px){main{padding:22px 16px 48px}.hero{grid-template-columns:1fr;padding:18px}
 .hero .big{font-size:3.4rem}.facts th{width:7.5em;white-space:normal}
 td,th{padding-right:10px}.list td:not(.number,.bar){min-width:6.2em;overflow-wrap:anywhere}.pairs .bar{display:none}
 .mistakes{grid-template-columns:repeat(auto-fill,minmax(128px,1fr))}
 h3 small{display:block;margin:0}.curve svg text{font-size:14.5px}.curve svg text.name{font-size:13.5px}}
@media print{main{max-width:none;padding:0}body{font-size:11pt}.hero,.tiles div,.bar div,.map,.dots,.mistakes div,pre,
 .bar i,.bar s,.scale *{print-color-adjust:exact;-webkit-print-color-adjust:exact}
 figure,.hero,.tiles,tr{break-inside:avoid}h2,h3,thead{break-after:avoid}.scroll{overflow:visible}.map{max-width:100%;height:auto}
 .curves{grid-template-columns:1fr 1fr}pre{white-space:pre-wrap}}
"""

SCRIPT = """
for (const svg of document.querySelectorAll("svg[data-lines]")) {
  const lines = JSON.parse(svg.dataset.lines), cursor = svg.querySelector(".cursor");
  const tip = svg.parentNode.querySelector(".tip"), view = svg.viewBox.baseVal;
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) * view.width / box.width;
    const nearest = line => line.points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
    const found = lines.map(nearest), at = found[0][0];
    tip.textContent = found.map((point, i) => (lines[i].name + " " + point[1]).trim()).join("\\n");
    for (const [key, value] of Object.entries({x1: at, x2: at, y1: 12, y2: view.height - 40}))
      cursor.setAttribute(key, value);
    const left = at * box.width / view.width, wide = tip.offsetWidth;
    tip.style.left = (left + wide + 24 > box.width ? Math.max(0, left - wide - 10) : left + 10) + "px";
    tip.style.top = box.top - svg.parentNode.getBoundingClientRect().top + 14 + "px";
    tip.style.visibility = cursor.style.visibility = "visible";
  });
  svg.addEventListener("pointerleave", () => { tip.style.visibility = cursor.style.visibility = "hidden"; });
}
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(each => { each.open = true; }));
"""
