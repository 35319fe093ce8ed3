"""The report as one page that needs nothing beside it."""

import html
from collections import Counter

from .book import Book
from .charts import COLOURS
from .charts_svg import svg
from .claims import OURS, VERDICTS, Claim, Verdict
from .report_sections import Section

# The same order as COLOURS, for dark screens.
_DARK = ("#f2f2f2", "#5ab0f2", "#ff9a55", "#38c995", "#d592e6", "#a8a8a8", "#d8b73a", "#ff7fb5")
_SYMBOLS = dict(zip(VERDICTS, ("✓", "~", "✗", "?"), strict=True))
_KINDS = dict(zip(VERDICTS, ("yes", "weak", "no", "none"), strict=True))

Judged = list[tuple[Claim, Verdict]]


def page(book: Book, sections: list[Section], judged: Judged, circumstances: list[str]) -> str:
    body = "".join(_section(section, [pair for pair in judged if pair[0].item == section.item]) for section in sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8" />
<meta name="viewport" content="width=device-width, initial-scale=1" />
<meta name="color-scheme" content="light dark" />
<title>Sampled softmax with random Fourier features, reproduced</title>
<style>{_style()}</style>
</head>
<body>
<main>
<h1>Sampled softmax with random Fourier features, reproduced</h1>
<p>A classifier with n classes needs, for each training example, the sum Z of n exponentials. <em>Sampled softmax</em>
estimates Z from m classes drawn from a distribution q. The closer q is to the softmax itself, the smaller the bias of
the gradient. Rawat, Chen, Yu, Suresh and Kumar (NeurIPS 2019) draw from a tree of random Fourier features
(<em>RF-softmax</em>, here Rff): D of them stand for the kernel exp(nu h.c) of a query h and a class c, both of unit
length, where the softmax has exp(tau h.c). This page sets the paper's numbers beside ours and judges each of its claims
by a rule that stands beside it; how our runs are smaller is said at each.</p>
{_WORDS}{_summary(judged)}
{body}<h2 id="made">How this page was made</h2>
<p>By <code>rfsoftmax reproduce all</code> and <code>rfsoftmax report</code>, from the files in results/reproduce alone,
at the scale <em>{html.escape(book.scale)}</em>{_OTHER_SCALE if book.scale != "small" else ""}. Where something was not
run, it says so.</p>
<ul>{"".join(f"<li>{html.escape(line)}</li>" for line in circumstances)}</ul>
</main>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _summary(judged: Judged) -> str:
    counts = Counter(verdict.kind for claim, verdict in judged if claim.paper != OURS)
    said = ", ".join(f"{counts[kind]} {_PHRASES[kind]}" for kind in VERDICTS)
    rows = "".join(_claim(claim, verdict, link=True) for claim, verdict in judged)
    own = len(judged) - counts.total()
    ours = f" {own} more is ours and marked so." if own else ""
    heading = '<h2 id="claims">The claims at a glance</h2>'
    return (
        f'{heading}\n<p>Of the paper\'s {counts.total()} claims {said}.{ours}</p>\n<ul class="claims">\n{rows}</ul>\n'
    )


_WORDS = """<details open><summary>Words used here</summary><dl>
<dt>full, EXP, Uniform, Unigram, Quadratic, MIDX, default</dt>
<dd>Where negatives come from. Full: the softmax over all classes, nothing sampled. EXP: q is the softmax itself, which
costs as much as full. Uniform: all classes alike. Unigram: as often as in the training data. Quadratic: q is in
proportion to 100 (h.c)² + 1. MIDX: an inverted multi-index, which draws a cluster of classes, then a class in it.
Default: what this library takes if nothing is said.</dd>
<dt>tau, nu, T</dt><dd>The softmax is of tau h.c; the kernel that is sampled from is exp(nu h.c), and T = 1/sqrt(nu).
The paper trains with 1/sqrt(tau) = 0.3, so that T = 0.3 is nu = tau.</dd>
<dt>absolute softmax</dt><dd>The softmax of tau |h.c|, with which models by Quadratic are trained, as in the paper.</dd>
<dt>chi2</dt><dd>How far q is from the softmax p over the negatives: the sum of p²/q, less 1. It is 0 if they are the
same; m samples estimate Z with a relative variance of chi2/m.</dd>
<dt>bias, LB, UB</dt><dd>The mean of the gradient by sampling less the gradient of the full softmax; relative: its
length by that of the gradient. LB and UB are Theorem 1's bounds of each of its coordinates.</dd>
<dt>SORF, Maclaurin, positive features</dt><dd>Other features for the same kernel: structured orthogonal frequencies,
products of random signs, and exponentials, which are never negative.</dd>
<dt>P@k</dt><dd>Precision at k: the share of right ones among the k classes with the largest scores.</dd>
</dl></details>
"""
_OTHER_SCALE = " (the texts say how the scale small differs from the paper; the settings of this one are in its files)"
_PHRASES = dict(zip(VERDICTS, ("hold", "hold weaker", "do not hold here", "are not tested"), strict=True))


def _section(section: Section, judged: Judged) -> str:
    claims = "".join(_claim(claim, verdict, link=False) for claim, verdict in judged)
    charts = "".join(map(svg, section.charts))
    notes = "".join(f"<p>{html.escape(note)}</p>\n" for note in section.notes)
    return f"""<section id="{section.item}">
<h2>{html.escape(section.title)}</h2>
<p><strong>The paper.</strong> {html.escape(section.paper)}</p>
<p><strong>Here.</strong> {html.escape(section.ours)}</p>
<div class="charts">{charts}</div>
{"".join(section.tables)}{notes}<ul class="claims">
{claims}</ul>
</section>
"""


def _claim(claim: Claim, verdict: Verdict, *, link: bool) -> str:
    """A sentence, its verdict and the numbers; in its own section also the rule."""
    sentence = html.escape(claim.sentence)
    sentence = f'<a href="#{claim.item}">{sentence}</a>' if link else sentence
    numbers = f"Paper: {html.escape(claim.paper)}. Here: {html.escape(verdict.number)}."
    rule = "" if link else f"<br/><small>Rule: {html.escape(claim.rule)}.</small>"
    badge = f'<span class="verdict {_KINDS[verdict.kind]}">{_SYMBOLS[verdict.kind]} {verdict.kind}</span>'
    return f"<li>{badge} {sentence}<br/><small>{numbers}</small>{rule}</li>\n"


def _style() -> str:
    light = "".join(f"--c{i}: {colour}; " for i, colour in enumerate(COLOURS))
    dark = "".join(f"--c{i}: {colour}; " for i, colour in enumerate(_DARK))
    classes = "".join(f".c{i} {{ --colour: var(--c{i}); }}\n" for i in range(len(COLOURS)))
    return f"""
:root {{ {light}--ink: #222; --paper: #fff; --faint: #5a5a5a; --line: #d8d8d8; --shade: #f3f3f3; --link: #0063a8;
  --yes: #00603f; --weak: #6b5000; --no: #a01010; --none: #5a5a5a; }}
@media (prefers-color-scheme: dark) {{ :root {{ {dark}--ink: #e8e8e8; --paper: #151719; --faint: #b0b0b0;
  --line: #3a3d41; --shade: #23262a; --link: #7cc0f5; --yes: #4fd6a4; --weak: #e3c04f; --no: #ff8f8f;
  --none: #b0b0b0; }} }}
{classes}{_CSS}"""


_CSS = """
* { box-sizing: border-box; }
body { font: 17px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0; }
main { max-width: 62rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
main > p, section > p, ul.claims { max-width: 46rem; }
h1 { font-size: 1.6rem; line-height: 1.2; }
h2 { font-size: 1.25rem; line-height: 1.25; margin: 2.5rem 0 0.5rem; }
a { color: var(--link); }
small { color: var(--faint); font-size: 0.85em; }
code { background: var(--shade); padding: 0.1rem 0.3rem; }
dt { font-weight: 600; margin-top: 0.4rem; }
dd { margin: 0 0 0 1rem; }
summary { cursor: pointer; font-weight: 600; }
details { max-width: 46rem; }
ul.claims { list-style: none; padding: 0; }
ul.claims li { border-left: 3px solid var(--line); padding: 0.2rem 0 0.2rem 0.8rem; margin: 0.7rem 0; }
.verdict { font-weight: 600; border: 1px solid; border-radius: 0.4rem; padding: 0 0.45rem; white-space: nowrap; }
.yes { color: var(--yes); } .weak { color: var(--weak); } .no { color: var(--no); } .none { color: var(--none); }
.charts { display: flex; flex-wrap: wrap; gap: 1rem; }
.chart { margin: 0.5rem 0; flex: 1 1 26rem; max-width: 36rem; min-width: 0; }
figcaption { font-weight: 600; }
svg { width: 100%; height: auto; display: block; }
svg text { font: 13px system-ui, sans-serif; fill: var(--ink); }
svg .tick, svg .axis { fill: var(--faint); }
svg .name { fill: var(--colour); }
svg .bold .name { font-weight: 700; }
svg .grid { stroke: var(--line); stroke-width: 1; }
.curve polyline { fill: none; stroke: var(--colour); }
.curve .line { stroke-width: 2; }
.curve.bold .line { stroke-width: 3.2; }
.curve .leader { stroke-width: 1; stroke-dasharray: 2 3; opacity: 0.6; }
.curve circle { fill: var(--colour); }
.curve .band { fill: var(--colour); opacity: 0.18; }
.off { display: none; }
.boxes { border: 1px solid var(--line); border-radius: 0.4rem; padding: 0.2rem 0.6rem 0.5rem; margin: 0.3rem 0 0;
  min-width: 0; }
.boxes legend { color: var(--faint); font-size: 0.85em; }
.boxes label { display: inline-block; margin: 0.15rem 0.9rem 0.15rem 0; color: var(--colour); white-space: nowrap; }
.boxes input { width: 1.1em; height: 1.1em; vertical-align: -0.15em; accent-color: var(--colour); }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: 0.3rem 0.6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { vertical-align: bottom; white-space: normal; min-width: 4rem; max-width: 9rem; }
th:first-child, td:first-child { text-align: left; }
tr.ours { font-weight: 700; color: var(--c1); }
.missing { color: var(--faint); font-style: italic; }
@media (max-width: 40rem) { body { font-size: 16px; } .chart { flex-basis: 100%; }
  svg text { font-size: 15px; letter-spacing: -0.02em; } }
@media print { .boxes { display: none; } }
"""
_SCRIPT = """
for (const box of document.querySelectorAll("input[data-for]")) {
  const show = () => {
    for (const part of document.querySelectorAll(`[data-curve="${box.dataset.for}"]`)) {
      part.classList.toggle("off", !box.checked);
    }
  };
  box.addEventListener("change", show);
  show();
}
"""
