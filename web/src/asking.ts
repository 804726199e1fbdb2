// The conversation, and the field to ask in.

import { type About, ask, type Citation, type Message, type Options, Problem, sendJSON, type Verification } from "./api";
import { clear, count, h, icon, ICONS } from "./dom";
import { isGood, questionField } from "./field";
import type { Details } from "./report";
import { Settings } from "./settings";
import { emptyPlace } from "./states";
import { emptyReply, type Reply, type Turn, TurnView } from "./turn";

/** The view in which questions are asked. */
export class Asking {
  readonly element: HTMLElement;
  private readonly thread = h("div", { class: "thread", tabindex: "0", role: "region", "aria-label": "Conversation" });
  private readonly field: ReturnType<typeof questionField>;
  private readonly button: HTMLButtonElement;
  private readonly settings: Settings;
  private views: TurnView[] = [];
  private running: AbortController | null = null;

  constructor(
    private readonly about: About,
    private readonly announce: (text: string) => void,
    private readonly keep: (turns: Turn[]) => void,
  ) {
    this.settings = new Settings(about);
    this.button = h("button", { type: "button", class: "main round", onclick: () => this.press() });
    this.field = questionField("Your question", () => this.running || this.send(), this.button);
    this.element = h(
      "div",
      { class: "asking" },
      this.thread,
      h("div", { class: "composer" }, this.field.element, this.settings.element),
    );
    this.showButton();
    this.clear();
  }

  /** Begin a new conversation. */
  clear(): void {
    this.running?.abort();
    this.views = [];
    clear(this.thread, this.welcome());
    this.field.input.value = "";
    this.field.resize();
  }

  /** Show the welcome again, if there is no conversation, after a change of the documents. */
  refresh(): void {
    if (this.views.length === 0) clear(this.thread, this.welcome());
  }

  /** Show a conversation that was kept. */
  restore(turns: Turn[]): void {
    this.clear();
    for (const turn of turns) this.append(turn).end(this.about.max_tokens);
    this.thread.scrollTop = 0;
  }

  focus(): void {
    this.field.resize();
    this.field.input.focus();
  }

  private welcome(): HTMLElement {
    const { about } = this;
    if (about.num_chunks === 0) {
      return emptyPlace(
        "This index has no documents yet",
        h(
          "p",
          {},
          about.can_upload
            ? "Add some under Documents, or a whole folder with this command:"
            : "Add a folder of text, Markdown, HTML, PDF or Word files, then load this page again:",
        ),
        h("pre", {}, `kvrag ingest FOLDER --index ${about.index}`),
      );
    }
    return emptyPlace(
      `Ask ${about.index}`,
      h(
        "p",
        {},
        `${about.model} answers from ${count(about.num_documents, "document")}, and shows the passages that it read. It can be wrong.`,
      ),
      ...about.examples.map((heading) => {
        const question = heading.endsWith("?") ? heading : `Tell me about “${heading}”.`;
        return h("button", { type: "button", class: "example", onclick: () => this.running || this.ask(question) }, question);
      }),
    );
  }

  private press(): void {
    if (this.running) this.running.abort();
    else this.send();
  }

  private send(): void {
    const { input, resize } = this.field;
    if (!isGood(input)) return;
    const question = input.value.trim();
    input.value = "";
    resize();
    this.ask(question);
  }

  private ask(question: string): void {
    const view = this.append({ question, ...emptyReply(this.settings.words, this.settings.options) });
    view.element.scrollIntoView({ block: "start" });
    void this.answer(view);
  }

  private append(turn: Turn): TurnView {
    const view: TurnView = new TurnView(turn, {
      again: () => void this.answer(view),
      edit: (question) => {
        if (this.running) return; // an answer to another question, asked meanwhile
        turn.question = question;
        // What was said after it was said of another question.
        for (const one of this.views.splice(this.views.indexOf(view) + 1)) one.element.remove();
        void this.answer(view);
      },
      check: () => void this.check(view),
      rated: this.about.keeps_history ? () => this.keep(this.views.map((one) => one.turn)) : undefined,
    });
    if (this.views.length === 0) clear(this.thread, h("h1", { class: "hidden" }, this.about.index));
    this.views.push(view);
    this.thread.append(view.element);
    return view;
  }

  private async answer(view: TurnView): Promise<void> {
    const { turn } = view;
    const maxTokens = this.about.max_tokens;
    await this.run(
      async (signal) => {
        this.announce("Searching and reading");
        view.begin(this.settings.words, this.settings.options);
        const onPiece = (piece: string) => {
          view.add(piece);
          this.follow();
        };
        const onFound = (found: Citation[]) => view.found(found);
        await this.read(view, turn, this.settings.options, signal, onPiece, onFound);
        const follows = this.isAtEnd;
        view.end(maxTokens);
        if (follows) view.element.scrollIntoView({ block: "nearest" });
        this.announce(`Answer complete: ${turn.answer}`);
      },
      (problem) => {
        if (problem) {
          view.fail(problem);
          return;
        }
        turn.finish = "stopped";
        view.end(maxTokens);
        this.announce("Answer stopped");
      },
    );
    // A conversation that was left meanwhile stays as it was.
    if (this.views.includes(view)) this.keep(this.views.map((one) => one.turn));
  }

  /** Have the answer computed in full, too. */
  private async check(view: TurnView): Promise<void> {
    const { rag, max_tokens } = this.about;
    const body = { model: rag, messages: this.messages(view), max_tokens, kvrag: view.turn.options };
    await this.run(
      async (signal) => {
        view.beginCheck();
        const found: Verification = await (await sendJSON("v1/kvrag/verify", "POST", body, signal)).json();
        this.announce(view.endCheck(found));
      },
      (problem) => view.failCheck(problem),
    );
  }

  /** Do what may be stopped, one at a time; `failed` gets null if the person stopped it. */
  private async run(
    task: (signal: AbortSignal) => Promise<void>,
    failed: (problem: Problem | null) => void,
  ): Promise<void> {
    if (this.running) return;
    const running = new AbortController();
    this.running = running;
    this.showButton();
    try {
      await task(running.signal);
    } catch (error) {
      if (running.signal.aborted) failed(null);
      else if (error instanceof Problem) failed(error);
      else throw error;
    } finally {
      this.running = null;
      this.showButton();
    }
  }

  private async read(
    view: TurnView,
    reply: Reply,
    options: Options,
    signal: AbortSignal,
    onPiece: (piece: string) => void,
    onFound: (found: Citation[]) => void = () => undefined,
  ): Promise<void> {
    const { about } = this;
    for await (const event of ask(about.rag, this.messages(view), about.max_tokens, options, signal)) {
      if (event.kvrag?.found) onFound(event.kvrag.found);
      else if (event.kvrag) reply.details = detailsOf(event.kvrag);
      const [choice] = event.choices;
      if (!choice) continue;
      if (choice.delta.content) onPiece(choice.delta.content);
      if (choice.delta.annotations) {
        reply.citations = choice.delta.annotations.map((one: any) => one.url_citation);
      }
      if (choice.finish_reason) reply.finish = choice.finish_reason;
    }
  }

  /** The conversation up to a question. Questions without an answer are left out. */
  private messages(view: TurnView): Message[] {
    const earlier = this.views.slice(0, this.views.indexOf(view)).filter((one) => one.turn.answer);
    const said: Message[] = this.about.is_chat
      ? earlier.flatMap(({ turn }) => [
          { role: "user" as const, content: turn.question },
          { role: "assistant" as const, content: turn.answer },
        ])
      : [];
    return [...said, { role: "user", content: view.turn.question }];
  }

  /** Keep the end of the answer in sight, unless the person has scrolled away from it. */
  private follow(): void {
    if (this.isAtEnd) this.thread.scrollTop = this.thread.scrollHeight;
  }

  private get isAtEnd(): boolean {
    return this.thread.scrollHeight - this.thread.clientHeight - this.thread.scrollTop < 80;
  }

  private showButton(): void {
    const label = this.running ? "Stop" : "Ask";
    this.button.setAttribute("aria-label", label);
    this.button.title = label;
    this.button.classList.toggle("stops", this.running !== null);
    this.element.classList.toggle("busy", this.running !== null);
    clear(this.button, icon(this.running ? ICONS.stop : ICONS.send));
  }
}

function detailsOf(told: any): Details {
  return {
    report: told.reports[0],
    parts: told.parts?.[0] ?? [],
    ttft_seconds: told.ttft_seconds[0],
    search_seconds: told.search_seconds ?? 0,
  };
}
