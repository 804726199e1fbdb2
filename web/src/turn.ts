// One question with its answer, from the first token to the last.

import { type Citation, Problem } from "./api";
import { clear, count, h } from "./dom";
import { cards } from "./sources";
import { failure } from "./states";

export type Finish = "stop" | "length" | "stopped" | "failed";

/** What is kept of a question and its answer. */
export interface Turn {
  question: string;
  answer: string;
  finish: Finish;
  citations: Citation[];
}

/** A turn on the page. */
export class TurnView {
  readonly element: HTMLElement;
  private readonly text = h("div", { class: "answer" });
  private readonly after = h("div", { class: "after" });

  constructor(readonly turn: Turn) {
    this.element = h(
      "article",
      { class: "turn" },
      h("h2", {}, turn.question),
      this.text,
      this.after,
    );
  }

  begin(): void {
    this.turn.answer = "";
    this.turn.citations = [];
    this.text.setAttribute("aria-busy", "true");
    clear(this.text, h("span", { class: "waiting" }, "Searching and reading"));
    clear(this.after);
  }

  add(piece: string): void {
    if (!this.turn.answer) clear(this.text);
    this.turn.answer += piece;
    this.text.append(piece);
  }

  /** Show how the answer ended; the turn says it. */
  end(maxTokens: number): void {
    const { answer, finish, citations } = this.turn;
    this.text.removeAttribute("aria-busy");
    clear(this.text, answer || h("span", { class: "faint" }, "The model said nothing."));
    const why = {
      stop: "",
      length: `The answer was cut after ${count(maxTokens, "token")}.`,
      stopped: "You stopped this answer.",
      failed: "",
    }[finish];
    clear(this.after, why && h("p", { class: "note" }, why), citations.length > 0 && cards(citations));
  }

  fail(problem: Problem, again: () => void): void {
    this.turn.finish = "failed";
    this.text.removeAttribute("aria-busy");
    clear(this.text, this.turn.answer);
    clear(this.after, failure(problem, again));
  }
}
