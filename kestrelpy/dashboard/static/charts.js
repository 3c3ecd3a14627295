// Lines over time as inline SVG. Text goes in as text nodes, numbers as attributes; nothing here is parsed as markup.
"use strict";

const Charts = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const COLOURS = 5;
  const LEAST_POINTS = 30;
  const LEFT = 46, RIGHT = 10, TOP = 22, BOTTOM = 20;

  function shape(name, attributes, text) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  // Runs of points without a gap: arrays of [x, y].
  function runs(points, x, y) {
    const found = [];
    let run = null;
    points.forEach((value, at) => {
      if (value === null || value === undefined) { run = null; return; }
      if (run === null) { run = []; found.push(run); }
      run.push([x(at), y(value)]);
    });
    return found;
  }

  const path = run => "M" + run.map(([x, y]) => x.toFixed(1) + " " + y.toFixed(1)).join("L");

  // 1, 2 or 5 times a power of ten, not below the value.
  function ceiling(value) {
    if (!(value > 0)) return 1;
    const power = 10 ** Math.floor(Math.log10(value));
    return [1, 2, 5, 10].map(step => step * power).find(step => step >= value * 0.999);
  }

  // A small line without axes, for a cell of a table.
  function spark(points, label) {
    const wide = 128, high = 26, top = Math.max(...points.map(value => value || 0), 0.001);
    const svg = shape("svg", {class: "spark", viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": label});
    const x = at => 1 + at * (wide - 2) / Math.max(1, points.length - 1);
    const y = value => high - 2 - value / top * (high - 4);
    for (const run of runs(points, x, y)) {
      if (run.length === 1) run.push([run[0][0] + 1, run[0][1]]);
      svg.append(shape("path", {class: "curve c0", d: path(run)}));
    }
    return svg;
  }

  // Without what is before the first point of all, but for so many points.
  function sinceFirst(lines) {
    const known = lines.map(line => line.points.findIndex(value => value !== null)).filter(at => at >= 0);
    const count = Math.max(...lines.map(line => line.points.length));
    const cut = Math.max(0, Math.min(...known, count - LEAST_POINTS));
    return known.length ? lines.map(line => ({...line, points: line.points.slice(cut)})) : lines;
  }

  // A chart in `place`. `lines`: [{name, points}], all of one length; the last point is at `lastMs`.
  function draw(place, whole, {lastMs, slotSeconds, unit, format, onAxis = format}) {
    const lines = sinceFirst(whole);
    const wide = Math.max(240, place.clientWidth), high = Math.max(120, place.clientHeight);
    const count = Math.max(2, ...lines.map(line => line.points.length));
    const highest = Math.max(0, ...lines.flatMap(line => line.points.map(value => value || 0)));
    const top = ceiling(highest);
    const x = at => LEFT + at * (wide - LEFT - RIGHT) / (count - 1);
    const y = value => high - BOTTOM - value / top * (high - TOP - BOTTOM);
    const newest = lines.map(line => `${line.name} ${format(line.points[line.points.length - 1] || 0)}`).join(", ");
    const svg = shape("svg", {
      viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": `Now: ${newest} (${unit}). Most in this hour: ${format(highest)}.`,
    });
    for (const share of [0, 0.5, 1]) {
      svg.append(shape("line", {class: "rule", x1: LEFT, x2: wide - RIGHT, y1: y(top * share), y2: y(top * share)}));
      svg.append(shape("text", {x: LEFT - 6, y: y(top * share) + 4, "text-anchor": "end"}, onAxis(top * share)));
    }
    const seconds = (count - 1) * slotSeconds;
    for (const share of wide > 600 ? [0, 0.25, 0.5, 0.75, 1] : [0, 0.5, 1]) {
      const when = new Date(lastMs - seconds * 1000 * (1 - share));
      const text = when.toLocaleTimeString([], {hour: "2-digit", minute: "2-digit", hour12: false});
      const anchor = share === 0 ? "start" : share === 1 ? "end" : "middle";
      svg.append(shape("text", {x: LEFT + share * (wide - LEFT - RIGHT), y: high - 4, "text-anchor": anchor}, text));
    }
    lines.forEach((line, number) => drawLine(svg, line, number, {x, y, floor: y(0), filled: lines.length < 3}));
    drawKey(svg, lines, wide);
    follow(svg, lines, {wide, high, count, x, lastMs, slotSeconds, format});
    place.replaceChildren(svg);
  }

  function drawLine(svg, line, number, {x, y, floor, filled}) {
    const colour = "c" + number % COLOURS;
    for (const run of runs(line.points, x, y)) {
      if (filled && number === 0) {
        const area = [[run[0][0], floor], ...run, [run[run.length - 1][0], floor]];
        svg.append(shape("path", {class: "area " + colour, d: path(area) + "Z"}));
      }
      if (run.length === 1) run.push([run[0][0] + 1.5, run[0][1]]);
      svg.append(shape("path", {class: "curve " + colour, d: path(run)}));
    }
  }

  function drawKey(svg, lines, wide) {
    let at = LEFT;
    for (const [number, line] of lines.entries()) {
      const name = line.name.length > 18 ? line.name.slice(0, 17) + "…" : line.name;
      if (at > wide - 90) break;
      svg.append(shape("rect", {class: "key c" + number % COLOURS, x: at, y: 5, width: 10, height: 4, rx: 2}));
      svg.append(shape("text", {x: at + 15, y: 12}, name));
      at += 34 + name.length * 6.6;
    }
  }

  // A rule under the pointer, and what the lines are there.
  function follow(svg, lines, {wide, high, count, x, lastMs, slotSeconds, format}) {
    const cursor = shape("line", {class: "cursor", y1: TOP, y2: high - BOTTOM, visibility: "hidden"});
    const said = shape("text", {y: 12, x: wide - RIGHT, "text-anchor": "end", visibility: "hidden"});
    svg.append(cursor, said);
    svg.addEventListener("pointermove", event => {
      const box = svg.getBoundingClientRect();
      const share = ((event.clientX - box.left) * wide / box.width - LEFT) / (wide - LEFT - RIGHT);
      const at = Math.max(0, Math.min(count - 1, Math.round(share * (count - 1))));
      const when = new Date(lastMs - (count - 1 - at) * slotSeconds * 1000).toLocaleTimeString([], {hour12: false});
      const values = lines.filter(line => line.points[at] !== null && line.points[at] !== undefined);
      said.textContent = [when, ...values.slice(0, 4).map(line => `${line.name} ${format(line.points[at])}`)].join("   ");
      for (const one of [cursor, said]) one.setAttribute("visibility", "visible");
      cursor.setAttribute("x1", x(at));
      cursor.setAttribute("x2", x(at));
    });
    svg.addEventListener("pointerleave", () => {
      for (const one of [cursor, said]) one.setAttribute("visibility", "hidden");
    });
  }

  return {draw, spark};
})();
