// The passages that an answer was read from: numbered cards, and a drawer with the document.

import { getJSON, type Citation, type Passages, Problem } from "./api";
import { drawer } from "./dialogs";
import { clear, count, h, reflowed } from "./dom";
import { failure } from "./states";

const FEW = 3;
const MOST = 20;
const SNIPPET = 180;

export function cards(citations: Citation[]): HTMLElement {
  return h(
    "section",
    { class: "sources" },
    h("h3", {}, "Read from, best match first"),
    h("ol", {}, ...citations.map((one, number) => h("li", {}, card(one, number + 1)))),
  );
}

function card(one: Citation, number: number): HTMLElement {
  const snippet = one.text.replace(/[#*_`|\s]+/g, " ").trim().slice(0, SNIPPET);
  return h(
    "button",
    { type: "button", class: "card", onclick: () => void open(one, number) },
    h("span", { class: "number" }, number),
    h(
      "span",
      { class: "card-text" },
      h("span", { class: "title" }, one.title, h("span", { class: "faint" }, `, passage ${one.ordinal + 1}`)),
      h("span", { class: "snippet" }, snippet),
    ),
  );
}

/** Show a chunk in its document, with the chunks around it. */
async function open(one: Citation, number: number): Promise<void> {
  const { dialog, body } = drawer(one.title);
  let around = FEW;

  async function show(): Promise<void> {
    body.setAttribute("aria-busy", "true");
    const path = `v1/kvrag/chunks/${encodeURIComponent(one.chunk_id)}?around=${around}`;
    let found: Passages;
    try {
      found = await getJSON<Passages>(path);
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      clear(body, failure(error, () => void show()));
      return;
    } finally {
      body.removeAttribute("aria-busy");
    }
    if (dialog.open) fill(found);
  }

  function more(label: string): HTMLElement {
    return h(
      "button",
      {
        type: "button",
        class: "more",
        onclick: () => {
          around = Math.min(MOST, around + 5);
          void show();
        },
      },
      label,
    );
  }

  function fill(found: Passages): void {
    const first = found.passages[0].ordinal;
    const last = found.passages[found.passages.length - 1].ordinal;
    const canGrow = around < MOST;
    const texts = found.passages.map((passage) => {
      const isCited = passage.chunk_id === found.chunk_id;
      const place = [
        `Passage ${passage.ordinal + 1}`,
        passage.page === null ? "" : `page ${passage.page}`,
        passage.heading ?? "",
      ];
      return h(
        "section",
        { class: isCited ? "passage cited" : "passage" },
        h("p", { class: "place" }, place.filter(Boolean).join(" · ")),
        isCited
          ? h("mark", {}, h("span", { class: "hidden" }, `Source ${number}: `), reflowed(passage.text))
          : h("p", {}, reflowed(passage.text)),
      );
    });
    clear(
      body,
      h(
        "details",
        { class: "faint" },
        h("summary", {}, `${count(found.num_chunks, "passage")} in this document`),
        h("p", { class: "source" }, found.source),
      ),
      canGrow && first > 0 && more("Show what comes before"),
      ...texts,
      canGrow && last < found.num_chunks - 1 && more("Show what comes after"),
    );
    body.querySelector(".cited")?.scrollIntoView({ block: "start" });
  }

  clear(body, h("p", { class: "waiting" }, "Opening the document"));
  await show();
}
