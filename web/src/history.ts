// Conversations that the server keeps: the list at the side, search, renaming, export.

import { type About, call, getJSON, Problem, sendJSON } from "./api";
import { asked, confirmed, drawer } from "./dialogs";
import { clear, h, icon, iconButton, ICONS } from "./dom";
import { failure } from "./states";
import type { Turn } from "./turn";

interface Head {
  id: string;
  title: string;
  updated: number;
}

interface Conversation extends Head {
  turns: Turn[];
}

const ROOT = "v1/kvrag/conversations";
const SEARCH_DELAY = 250;
const TITLE = 80;

export class History {
  readonly element = h("nav", { class: "history", "aria-label": "Conversations" });
  private readonly list = h("ul", {});
  private readonly search: HTMLInputElement;
  private readonly isKept: boolean;
  private readonly titles = new Map<string, string>();
  private current: string | null = null;
  private timer = 0;

  constructor(
    about: About,
    private readonly open: (turns: Turn[]) => void,
    private readonly closed: () => void,
  ) {
    this.search = h("input", {
      type: "search",
      "aria-label": "Search conversations",
      placeholder: "Search conversations",
      maxlength: 200,
      oninput: () => {
        clearTimeout(this.timer);
        this.timer = setTimeout(() => void this.refresh(), SEARCH_DELAY);
      },
    });
    this.isKept = about.keeps_history;
    if (this.isKept) {
      this.element.append(this.search, this.list);
      void this.refresh();
    } else {
      this.element.append(h("p", { class: "faint" }, "This server keeps no conversations."));
    }
  }

  /** What follows is a new conversation. */
  begin(): void {
    this.current = null;
    this.mark();
  }

  /** Keep a conversation as it is now. A failure does not disturb it: the list says so. */
  async keep(turns: Turn[]): Promise<void> {
    if (!this.isKept || turns.length === 0) return;
    this.current ??= newId();
    const title = turns[0].question.replace(/\s+/g, " ").slice(0, TITLE);
    const known = this.titles.get(this.current);
    await this.attempt(async () => {
      await sendJSON(`${ROOT}/${this.current}`, "PUT", { title: known ?? title, turns });
      await this.refresh();
    });
  }

  private async refresh(): Promise<void> {
    await this.attempt(async () => {
      const text = this.search.value.trim();
      const path = text ? `${ROOT}?search=${encodeURIComponent(text)}` : ROOT;
      const { conversations } = await getJSON<{ conversations: Head[] }>(path);
      if (text !== this.search.value.trim()) return;
      for (const one of conversations) this.titles.set(one.id, one.title);
      const nothing = text ? "Nothing found." : "Your conversations appear here.";
      clear(
        this.list,
        ...conversations.map((one) => this.row(one)),
        conversations.length === 0 && h("li", { class: "faint" }, nothing),
      );
      this.mark();
    });
  }

  private row(one: Head): HTMLElement {
    return h(
      "li",
      { "data-id": one.id },
      h(
        "button",
        { type: "button", class: "conversation", onclick: () => void this.show(one) },
        one.title,
      ),
      iconButton(`More about ${one.title}`, ICONS.dots, () => this.more(one)),
    );
  }

  private mark(): void {
    for (const row of this.list.querySelectorAll("li")) {
      const button = row.querySelector(".conversation");
      if (row.dataset.id === this.current) button?.setAttribute("aria-current", "true");
      else button?.removeAttribute("aria-current");
    }
  }

  private async show(one: Head): Promise<void> {
    await this.attempt(async () => {
      const found = await getJSON<Conversation>(`${ROOT}/${one.id}`);
      this.current = one.id;
      this.mark();
      this.open(found.turns);
    });
  }

  private more(one: Head): void {
    const { dialog, body } = drawer(one.title, true);
    const choice = (label: string, picture: string, act: () => Promise<void>) =>
      h(
        "button",
        {
          type: "button",
          class: "wide",
          onclick: () => {
            dialog.close();
            void this.attempt(act);
          },
        },
        icon(picture),
        label,
      );
    clear(
      body,
      choice("Rename", ICONS.pencil, () => this.rename(one)),
      choice("Export as Markdown", ICONS.file, () => this.export(one, "md")),
      choice("Export as JSON", ICONS.file, () => this.export(one, "json")),
      choice("Delete", ICONS.trash, () => this.delete(one)),
    );
  }

  private async rename(one: Head): Promise<void> {
    const title = await asked("Rename this conversation", "Title", one.title, "Rename");
    if (title === null) return;
    await sendJSON(`${ROOT}/${one.id}`, "PATCH", { title: title.slice(0, 200) });
    await this.refresh();
  }

  private async delete(one: Head): Promise<void> {
    const text = "The server deletes its questions and answers. This cannot be undone.";
    if (!(await confirmed(`Delete “${one.title}”?`, text, "Delete"))) return;
    await call(`${ROOT}/${one.id}`, { method: "DELETE" });
    if (one.id === this.current) {
      this.begin();
      this.closed();
    }
    await this.refresh();
  }

  private async export(one: Head, kind: "md" | "json"): Promise<void> {
    const found = await getJSON<Conversation>(`${ROOT}/${one.id}`);
    const text = kind === "json" ? JSON.stringify(found, null, 2) : asMarkdown(found);
    const name = one.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60) || "conversation";
    const address = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
    h("a", { href: address, download: `${name}.${kind}` }).click();
    URL.revokeObjectURL(address);
  }

  private async attempt(act: () => Promise<void>): Promise<void> {
    this.element.querySelector(".failure")?.remove();
    try {
      await act();
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      this.element.append(failure(error));
    }
  }
}

/** A conversation as a document: questions are headings, sources are numbered. */
function asMarkdown({ title, turns }: Conversation): string {
  const parts = turns.map(({ question, answer, citations }) => {
    const sources = citations.map(
      (one, at) => `${at + 1}. ${one.title}, passage ${one.ordinal + 1}`,
    );
    return [`## ${question}`, answer, sources.join("\n")].filter(Boolean).join("\n\n");
  });
  return `# ${title}\n\n${parts.join("\n\n")}\n`;
}

/** Random, also where the page comes over plain HTTP and `randomUUID` is missing. */
function newId(): string {
  const numbers = crypto.getRandomValues(new Uint8Array(16));
  return [...numbers].map((one) => one.toString(16).padStart(2, "0")).join("");
}
