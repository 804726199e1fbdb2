// The page: asks the server what it serves, and shows the side with the view.

import { type About, getJSON, onMissingKey, Problem } from "./api";
import { Asking } from "./asking";
import { asked } from "./dialogs";
import { Documents } from "./documents";
import { clear, count, h, icon, iconButton, ICONS } from "./dom";
import { History } from "./history";
import { failure } from "./states";

const live = h("div", { class: "hidden", role: "status" });

function announce(text: string): void {
  live.textContent = text;
}

onMissingKey((wasWrong) =>
  asked(
    "This server asks for a key",
    "Key",
    "",
    "Continue",
    true,
    wasWrong
      ? "The server does not know the key that you gave."
      : "This tab remembers the key until you close it.",
  ),
);

async function start(): Promise<void> {
  clear(document.body, h("main", { class: "lone" }, h("p", { class: "waiting" }, "Loading")), live);
  let about: About;
  try {
    about = await getJSON<About>("v1/kvrag");
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    const retryable = error.status === 401 ? new Problem("Without a key, this server answers nothing") : error;
    clear(document.body, h("main", { class: "lone" }, h("h1", {}, "kvrag"), failure(retryable, start)), live);
    return;
  }
  document.title = `${about.index} · kvrag`;
  build(about);
}

function build(about: About): void {
  const history: History = new History(
    about,
    (turns) => {
      toggleSide(false);
      asking.restore(turns);
    },
    () => asking.clear(),
  );
  const asking = new Asking(about, announce, (turns) => void history.keep(turns));
  const main = h("main", {}, asking.element);
  const facts = h("dl", { class: "facts" });
  const documents = new Documents(about, () => void recount());
  const side = h("aside", { class: "side", id: "side", "aria-label": "Conversations and documents" });

  function toggleSide(isOpen: boolean): void {
    document.body.classList.toggle("side-open", isOpen);
    menu.setAttribute("aria-expanded", String(isOpen));
  }

  function showFacts(): void {
    clear(
      facts,
      h("dt", {}, "Index"),
      h("dd", {}, about.index),
      h("dt", {}, "Model"),
      h("dd", {}, about.model),
      h("dt", {}, "Holds"),
      h("dd", {}, `${count(about.num_documents, "document")}, ${count(about.num_chunks, "passage")}`),
    );
  }

  /** After a change of the documents. */
  async function recount(): Promise<void> {
    Object.assign(about, await getJSON<About>("v1/kvrag"));
    showFacts();
    asking.refresh();
  }

  function begin(): void {
    toggleSide(false);
    history.begin();
    asking.clear();
    asking.focus();
  }

  const menu = iconButton(
    "Menu",
    ICONS.menu,
    () => toggleSide(!document.body.classList.contains("side-open")),
    { class: "quiet menu", "aria-expanded": "false", "aria-controls": "side" },
  );
  side.append(
    h("span", { class: "brand" }, "kvrag"),
    h(
      "button",
      { type: "button", class: "wide", onclick: begin },
      icon(ICONS.plus),
      "New question",
    ),
    history.element,
    h(
      "button",
      {
        type: "button",
        class: "wide",
        onclick: () => {
          toggleSide(false);
          documents.open();
        },
      },
      icon(ICONS.file),
      "Documents",
    ),
    facts,
  );
  showFacts();
  const bar = h(
    "header",
    { class: "bar" },
    menu,
    h("span", { class: "brand" }, "kvrag"),
    h("span", { class: "faint" }, about.index),
  );
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") toggleSide(false);
  });
  main.addEventListener("click", () => toggleSide(false));
  clear(document.body, bar, side, main, live);
  asking.focus();
}

void start();
