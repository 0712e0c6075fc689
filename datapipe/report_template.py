"""Jinja2 template of the ingest report page: plain HTML and SVG, without scripts or outside files."""

from __future__ import annotations

from typing import Final

__all__ = ["PAGE"]

PAGE: Final = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Ingest report: {{ report.store }}</title>
<style>
:root { color-scheme: light dark; --line: #8884; --bar: #4472c4; --bad: light-dark(#b8323f, #ff8a80); }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.muted { opacity: .7; } .bad { color: var(--bad); font-weight: 600; }
.cards, .charts, .pictures { display: grid; gap: 1rem; }
.cards { grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); }
.charts { grid-template-columns: repeat(auto-fill, minmax(min(240px, 40%), 1fr)); align-items: end; }
.pictures { grid-template-columns: repeat(auto-fill, minmax(120px, 1fr)); }
.card { border: 1px solid var(--line); border-radius: 6px; padding: .5rem 1rem; }
.card b { display: block; font-size: 1.4rem; }
table { border-collapse: collapse; width: 100%; }
td, th { border-bottom: 1px solid var(--line); padding: .25rem .5rem; text-align: left; vertical-align: top; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
code { overflow-wrap: anywhere; }
figure { margin: 0; } .pictures figure { font-size: .75rem; }
.charts svg { display: block; max-width: 240px; }
.pictures img { display: block; max-width: 112px; background: #8882; }
figcaption { overflow-wrap: anywhere; }
rect { fill: var(--bar); }
@media (max-width: 640px) { /* examples stand below their reason */
  table, tbody { display: block; } th:last-child { display: none; }
  tr { display: grid; grid-template-columns: 1fr auto; border-bottom: 1px solid var(--line); }
  td, th { border: 0; } td:last-child { grid-column: 1 / -1; }
}
</style>
</head>
<body>
<h1>Ingest report</h1>
<p class="muted"><code>{{ report.store }}</code>, snapshot {{ report.snapshot }},
{{ num_rows }} rows in the store.
{% if report.is_interrupted %}<span class="bad">Stopped on request; a rerun continues.</span>{% endif %}</p>
<div class="cards">
<div class="card"><b>{{ report.num_added }}</b>added</div>
<div class="card"><b>{{ report.num_skipped }}</b>there already</div>
<div class="card {% if report.is_over_budget %}bad{% endif %}"><b>{{ report.num_bad }}</b>bad,
{{ "%.2f" | format(100 * report.bad_fraction) }}%
(budget {{ "%.2f" | format(100 * report.max_bad_fraction) }}%)</div>
<div class="card"><b>{{ report.num_duplicate_content }}</b>duplicates,
{{ report.num_left_out }} left out</div>
{% if report.num_videos %}<div class="card"><b>{{ report.num_videos }}</b>videos</div>{% endif %}
<div class="card"><b>{{ report.num_reoriented }}</b>turned upright</div>
<div class="card"><b>{{ report.num_with_alpha }}</b>with transparency</div>
<div class="card"><b>{{ report.num_multi_frame }}</b>with several frames</div>
<div class="card"><b>{{ "%.0f" | format(report.rows_per_s) }}/s</b>
over {{ "%.1f" | format(report.wall_s) }} s</div>
</div>

<h2>Sources</h2>
<ul>{% for source in report.sources %}<li><code>{{ source }}</code></li>{% endfor %}</ul>

{% macro reasons(title, counts, examples) %}
{% if counts %}
<h2>{{ title }}</h2>
<table>
<tr><th>reason</th><th class="number">count</th><th>examples</th></tr>
{% for reason, count in counts.items() %}
<tr><td>{{ reason }}</td><td class="number">{{ count }}</td><td>
{% for example in examples[reason] %}<div><code>{{ example.place }}</code>
<span class="muted">{{ example.detail }}</span></div>{% endfor %}</td></tr>
{% endfor %}
</table>
{% endif %}
{% endmacro %}
{{ reasons("Quarantined", report.reasons, report.examples) }}
{{ reasons("Notes", report.notes, report.note_examples) }}

{% if report.formats %}
<h2>Formats, modes and codecs of what was added</h2>
{% macro listed(counts) %}{% for name, count in counts.items() %}{{ name }} {{ count }}\
{{ ", " if not loop.last }}{% endfor %}{% endmacro %}
<p>{{ listed(report.formats) }}{% if report.modes %}; {{ listed(report.modes) }}{% endif %}\
{% if report.codecs %}; {{ listed(report.codecs) }}{% endif %}</p>
{% endif %}

{% if histograms %}
<h2>The store in numbers</h2>
<div class="charts">
{% for chart in histograms %}
<figure>
{% if chart.low < chart.high %}<svg viewBox="0 0 240 62" role="img" aria-label="{{ chart.title }}">
{% for bar in chart.bars %}<rect x="{{ bar.x }}" y="{{ 60 - bar.height }}" width="{{ chart.width }}" \
height="{{ bar.height }}"><title>{{ bar.count }}</title></rect>{% endfor %}
</svg>{% endif %}
<figcaption>{{ chart.title }}<br><span class="muted">{% if chart.low < chart.high %}\
{{ "%.4g" | format(chart.low) }} to
{{ "%.4g" | format(chart.high) }}, median {{ "%.4g" | format(chart.median) }}\
{% else %}always {{ "%.4g" | format(chart.low) }}{% endif %}</span></figcaption>
</figure>
{% endfor %}
</div>
{% endif %}

{% if thumbnails %}
<h2>Pictures, evenly picked</h2>
<div class="pictures">
{% for picture in thumbnails %}
<figure><img src="{{ picture.image }}" alt="{{ picture.key }}">
<figcaption><b>{{ picture.key }}</b> {{ picture.caption[:120] }}</figcaption></figure>
{% endfor %}
</div>
{% endif %}
</body>
</html>
"""
