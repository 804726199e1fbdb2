// One question with its answer, from the first token to the last.

import { type Citation, Problem } from "./api";
import { comparison } from "./diff";
import { clear, count, h, seconds } from "./dom";
import { type Details, reportView } from "./report";
import { Markdown } from "./markdown";
import { cards, notes } from "./sources";
import { failure } from "./states";

export type Finish = "stop" | "length" | "stopped" | "failed";

/** An answer, and how it was made. */
export interface Reply {
  answer: string;
  finish: Finish;
  citations: Citation[];
  details: Details | null;
  settings: string;
}

/** What is kept of a question. */
export interface Turn extends Reply {
  question: string;
}

export function emptyReply(settings: string): Reply {
  return { answer: "", finish: "failed", citations: [], details: null, settings };
}

/** What a person may do with an answer. */
export interface Actions {
  again(): void;
  compareWithPrefill(): void;
  compareWithSettings(): void;
}

const FULL_PREFILL = "full prefill";

/** A turn on the page. */
export class TurnView {
  readonly element: HTMLElement;
  private readonly text = h("div", { class: "answer" });
  private readonly markdown = new Markdown(this.text);
  private drawing = 0;
  private readonly after = h("div", { class: "after" });
  private readonly compared = h("div", { class: "after" });
  private readonly reports = h("div", {});
  private readonly buttons = h("div", { class: "actions" });
  private readonly otherButton: HTMLButtonElement;

  constructor(
    readonly turn: Turn,
    private readonly actions: Actions,
  ) {
    this.otherButton = h("button", { type: "button", onclick: () => actions.compareWithSettings() });
    this.element = h(
      "article",
      { class: "turn" },
      h("h2", {}, turn.question),
      this.text,
      this.after,
    );
  }

  begin(settings: string): void {
    Object.assign(this.turn, emptyReply(settings));
    this.text.setAttribute("aria-busy", "true");
    clear(this.text, h("span", { class: "waiting" }, "Searching and reading"));
    clear(this.after);
    clear(this.compared);
  }

  add(piece: string): void {
    this.turn.answer += piece;
    // Once for all pieces of a frame.
    this.drawing ||= requestAnimationFrame(() => this.draw(true));
  }

  /** Show the passages that were found, before the answer. */
  found(citations: Citation[]): void {
    clear(this.after, citations.length > 0 && cards(citations));
  }

  private draw(isOpen: boolean): void {
    cancelAnimationFrame(this.drawing);
    this.drawing = 0;
    const { answer, citations } = this.turn;
    this.markdown.show(answer, isOpen, isOpen ? [] : notes(answer, citations));
  }

  /** Show how the answer ended; the turn says it. */
  end(maxTokens: number): void {
    const { answer, finish, citations } = this.turn;
    this.text.removeAttribute("aria-busy");
    const why = {
      stop: "",
      length: `The answer was cut after ${count(maxTokens, "token")}.`,
      stopped: "You stopped this answer.",
      failed: "This answer was not finished.",
    }[finish];
    const nothing = why ? "" : h("span", { class: "faint" }, "The model said nothing.");
    this.draw(false);
    if (!answer.trim()) clear(this.text, nothing);
    const isCut = finish === "stopped" || finish === "failed";
    clear(
      this.buttons,
      isCut && h("button", { type: "button", onclick: () => this.actions.again() }, "Try again"),
      h(
        "button",
        { type: "button", onclick: () => this.actions.compareWithPrefill() },
        "Ask again with full prefill",
      ),
      this.otherButton,
    );
    this.showReport(null);
    clear(
      this.after,
      why && h("p", { class: "note" }, why),
      citations.length > 0 && cards(citations),
      this.reports,
      this.compared,
      this.buttons,
    );
  }

  /** Offer to ask again with settings; null if they are those of the answer. */
  offer(settings: string | null): void {
    this.otherButton.hidden = settings === null;
    this.otherButton.textContent = `Ask again with ${settings}`;
  }

  fail(problem: Problem): void {
    this.turn.finish = "failed";
    this.text.removeAttribute("aria-busy");
    this.draw(false);
    clear(this.after, failure(problem, () => this.actions.again()));
    this.after.scrollIntoView({ block: "nearest" });
  }

  beginComparison(): void {
    clear(this.compared, h("p", { class: "waiting" }, "Asking again"));
    this.compared.scrollIntoView({ block: "nearest" });
  }

  /** Show a second answer beside the first; null if there is none. */
  endComparison(other: Reply | null, problem: Problem | null = null): void {
    clear(this.compared, problem && failure(problem));
    if (other === null) return;
    const { turn } = this;
    if (other.settings === FULL_PREFILL && other.details !== null) {
      this.showReport(other.details.search_seconds + other.details.ttft_seconds);
    }
    this.compared.append(
      comparison(
        { label: turn.settings, text: turn.answer, note: firstToken(turn) },
        { label: other.settings, text: other.answer, note: firstToken(other) },
      ),
    );
    if (other.settings !== FULL_PREFILL && other.details !== null) {
      this.compared.append(reportView(other.details, null));
    }
    this.compared.scrollIntoView({ block: "nearest" });
  }

  private showReport(plainSeconds: number | null): void {
    const { details } = this.turn;
    const isOpen = this.reports.querySelector("details")?.open ?? false;
    clear(this.reports, details && reportView(details, plainSeconds));
    if (isOpen) this.reports.querySelector("details")!.open = true;
  }
}

export { FULL_PREFILL };

function firstToken({ details }: Reply): string {
  if (details === null) return "";
  return `first token after ${seconds(details.search_seconds + details.ttft_seconds)}`;
}
