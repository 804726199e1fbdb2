// How an answer's prompt was computed: its tokens by what happened to them, and the time by stage.

import { count, h, seconds, svg } from "./dom";

export type State = "kept" | "exact" | "reused" | "repaired" | "fresh";

export interface Part {
  start: number;
  end: number;
  state: State;
  why: string;
  text: string;
  layers: number[];
}

export interface Report {
  policy: string;
  num_tokens: number;
  num_kept: number;
  num_exact: number;
  num_reused: number;
  num_recomputed: number;
  num_fresh: number;
  num_cached: number;
  work_share: number;
  rows_by_layer: number[];
  seconds: Record<string, number>;
  misses: Record<string, number>;
}

/** The server's report on one answer. */
export interface Details {
  report: Report;
  parts: Part[];
  ttft_seconds: number;
  search_seconds: number;
}

const COLUMNS = 96;
const WIDTH = 10;
const HEIGHT = 14;
const GAP = 2;

const MEANS: Record<State, string> = {
  kept: "in memory since an earlier answer",
  exact: "stored, and equal to full prefill",
  reused: "stored, used as it is",
  repaired: "stored, but computed again in most layers",
  fresh: "computed",
};

/** Stages of the time to first token, in their order, with what each one does. */
const STAGES: [string, string][] = [
  ["layout", "Find stored text"],
  ["load", "Wait for stored KV"],
  ["ask", "Look at the question"],
  ["select", "Choose what to repair"],
  ["compute", "Compute"],
  ["lost", "Work that was lost"],
];

export function reportView(details: Details): HTMLElement {
  const { report, parts } = details;
  const first = seconds(details.search_seconds + details.ttft_seconds);
  return h(
    "details",
    { class: "report" },
    h(
      "summary",
      {},
      `${report.num_cached.toLocaleString("en")} of ${count(report.num_tokens, "token")} reused, first token after ${first}`,
    ),
    h(
      "div",
      { class: "report-body" },
      h("h3", {}, "Tokens of the prompt"),
      parts.length > 0 && strip(parts, report),
      legend(report),
      parts.length > 0 && reasons(parts),
      parts.length > 0 && promptText(parts),
      waterfall(details),
      h("p", { class: "faint" }, `Policy: ${report.policy}`),
    ),
  );
}

/** A cell for each token in its state's colour; repair lies over it, denser in more layers. */
function strip(parts: Part[], report: Report): SVGElement {
  const rows = Math.ceil(report.num_tokens / COLUMNS);
  const numLayers = report.rows_by_layer.length;
  const cells = parts.flatMap((part) => {
    const base = part.state === "repaired" ? "reused" : part.state;
    const drawn = [...runs(part.start, part.end)].map((run) => cell(run, `cell ${base}`));
    if (base === "fresh") return drawn;
    for (let at = part.start; at < part.end; ) {
      const layers = part.layers[at - part.start];
      let end = at + 1;
      while (end < part.end && part.layers[end - part.start] === layers) end += 1;
      if (layers > 0) {
        for (const run of runs(at, end)) drawn.push(cell(run, "cell repaired", layers / numLayers));
      }
      at = end;
    }
    return drawn;
  });
  return svg(
    "svg",
    {
      class: "strip",
      viewBox: `0 0 ${COLUMNS * WIDTH} ${rows * (HEIGHT + GAP)}`,
      role: "img",
      "aria-label": `${count(report.num_tokens, "token")} in order; the list below has the same in words`,
    },
    ...cells,
  );
}

/** A stretch of tokens, cut at the ends of rows: row, first column, number of columns. */
function* runs(start: number, end: number): Generator<[number, number, number]> {
  while (start < end) {
    const row = Math.floor(start / COLUMNS);
    const last = Math.min(end, (row + 1) * COLUMNS);
    yield [row, start % COLUMNS, last - start];
    start = last;
  }
}

function cell([row, column, columns]: [number, number, number], name: string, opacity = 1) {
  return svg("rect", {
    class: name,
    x: column * WIDTH,
    y: row * (HEIGHT + GAP),
    width: columns * WIDTH,
    height: HEIGHT,
    "fill-opacity": opacity.toFixed(2),
  });
}

function legend(report: Report): HTMLElement {
  const numbers: [State, number][] = [
    ["kept", report.num_kept],
    ["exact", report.num_exact],
    ["reused", report.num_reused],
    ["repaired", report.num_recomputed],
    ["fresh", report.num_fresh],
  ];
  return h(
    "ul",
    { class: "legend" },
    ...numbers
      .filter(([, number]) => number > 0)
      .map(([state, number]) =>
        h(
          "li",
          {},
          h("span", { class: `swatch ${state}`, "aria-hidden": "true" }),
          h("b", {}, `${number.toLocaleString("en")} ${state}`),
          h("span", { class: "faint" }, MEANS[state]),
        ),
      ),
  );
}

function fold(label: string, ...children: Node[]): HTMLElement {
  return h("details", { class: "fold" }, h("summary", {}, label), ...children);
}

/** Why a part is as it is; passages are counted from one, as everywhere on the page. */
function reason(part: Part): string {
  return part.why.replace(/, chunk (\d+)$/, (_, number) => `, passage ${Number(number) + 1}`);
}

function reasons(parts: Part[]): HTMLElement {
  const numbers = new Map<string, [Part, number]>();
  for (const part of parts) {
    const key = `${part.state} ${part.why}`;
    const [first, number] = numbers.get(key) ?? [part, 0];
    numbers.set(key, [first, number + part.end - part.start]);
  }
  const rows = [...numbers.values()].sort((one, other) => other[1] - one[1]);
  return fold(
    "Where the tokens come from",
    h(
      "div",
      { class: "wide-table", tabindex: "0", role: "region", "aria-label": "Where the tokens come from" },
      h(
        "table",
        {},
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            h("th", { scope: "col", class: "figure" }, "Tokens"),
            ...["State", "Why"].map((one) => h("th", { scope: "col" }, one)),
          ),
        ),
        h(
          "tbody",
          {},
          ...rows.map(([part, number]) =>
            h(
              "tr",
              {},
              h("td", { class: "figure" }, number.toLocaleString("en")),
              h("td", {}, part.state),
              h("td", {}, reason(part).replace(/^.*[\\/]/, "") || "–"),
            ),
          ),
        ),
      ),
    ),
  );
}

function promptText(parts: Part[]): HTMLElement {
  const text = h("div", {
    class: "prompt-text",
    tabindex: "0",
    role: "region",
    "aria-label": "The prompt's text",
  });
  for (const part of parts) {
    text.append(h("span", { class: `said ${part.state}`, title: `${part.state}: ${reason(part)}` }, part.text));
  }
  return fold("The prompt's text, coloured", text);
}

function waterfall(details: Details): HTMLElement {
  const { report } = details;
  const rows: [string, number][] = [["Search the index", details.search_seconds]];
  let counted = 0;
  for (const [name, label] of STAGES) {
    const spent = report.seconds[name] ?? 0;
    counted += spent;
    if (spent > 0) rows.push([label, spent]);
  }
  rows.push(["First step", Math.max(0, details.ttft_seconds - counted)]);
  const total = rows.reduce((sum, [, spent]) => sum + spent, 0);
  const plain = estimated(details);
  const longest = Math.max(total, plain ?? 0) || 1;
  let at = 0;
  const lines = rows.map(([label, spent]) => {
    const line = bar(label, at, spent, longest, "stage");
    at += spent;
    return line;
  });
  lines.push(bar("First token", 0, total, longest, "total"));
  if (plain !== null) lines.push(bar("Full prefill (estimate)", 0, plain, longest, "plain"));
  const note =
    plain === null
      ? report.num_cached
        ? "Everything was reused, so nothing tells how long full prefill would take."
        : "Nothing was reused, so this is full prefill."
      : "The estimate is the time of searching, and of computing every token as fast as the tokens that were computed here.";
  return h(
    "div",
    { class: "waterfall" },
    h("h3", {}, "Time to the first token"),
    h("table", {}, h("caption", { class: "hidden" }, "Time by stage"), h("tbody", {}, ...lines)),
    h("p", { class: "faint" }, `${note} Stages take turns in each layer; a bar is a stage's whole time.`),
  );
}

/** What full prefill would have taken, from the rows that were computed; null without reuse. */
function estimated({ report, search_seconds }: Details): number | null {
  const compute = report.seconds.compute ?? 0;
  if (!report.num_cached || !report.work_share || !compute) return null;
  return search_seconds + (report.seconds.layout ?? 0) + compute / report.work_share;
}

function bar(label: string, start: number, spent: number, longest: number, kind: string): HTMLElement {
  const filled = h("div", { class: `bar-fill ${kind}` });
  filled.style.marginInlineStart = `${(100 * start) / longest}%`;
  filled.style.width = `${(100 * spent) / longest}%`;
  return h(
    "tr",
    {},
    h("th", { scope: "row" }, label),
    h("td", { class: "bar-cell", "aria-hidden": "true" }, filled),
    h("td", { class: "figure" }, seconds(spent)),
  );
}
