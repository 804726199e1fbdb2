// The documents of the index: a list, and what the server allows to do with them.

import { type About, authorization, call, getJSON, newKey, NO_SERVER, Problem } from "./api";
import { confirmed, drawer } from "./dialogs";
import { bytes, clear, count, h, iconButton, ICONS } from "./dom";
import { failure } from "./states";

interface DocumentRow {
  source: string;
  title: string;
  num_chunks: number;
  num_tokens: number;
  is_file: boolean;
}

interface Step {
  stage?: string;
  num_tokens_done?: number;
  num_tokens?: number;
  num_chunks?: number;
  error?: { message: string };
}

const ROOT = "v1/kvrag/documents";

export class Documents {
  private readonly list = h("ul", { class: "documents" });
  private readonly state = h("div", { class: "upload-state", role: "status" });
  private isAdding = false;

  constructor(
    private readonly about: About,
    private readonly changed: () => void,
  ) {}

  open(): void {
    const { body } = drawer("Documents");
    clear(this.list, h("li", { class: "waiting" }, "Loading"));
    body.append(this.about.can_upload ? this.uploading() : this.refusal(), this.state, this.list);
    void this.refresh();
  }

  private refusal(): HTMLElement {
    return h(
      "p",
      { class: "faint" },
      "This server takes no documents. Add some with kvrag ingest, or start it with --allow-upload.",
    );
  }

  private uploading(): HTMLElement {
    const input = h("input", {
      id: "upload",
      type: "file",
      onchange: () => {
        const file = input.files?.[0];
        input.value = "";
        if (file) void this.upload(file);
      },
    });
    return h(
      "div",
      { class: "upload" },
      h("label", { for: "upload" }, "Add a document"),
      input,
      h("p", { class: "faint" }, "Text, Markdown, HTML, PDF, Word and others, up to 50 MB."),
    );
  }

  private async refresh(): Promise<void> {
    try {
      const { documents } = await getJSON<{ documents: DocumentRow[] }>(ROOT);
      const nothing = h("li", { class: "faint" }, "There are no documents yet.");
      clear(this.list, ...(documents.length ? documents.map((one) => this.row(one)) : [nothing]));
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      clear(this.list, h("li", {}, failure(error, () => void this.refresh())));
    }
  }

  private row(one: DocumentRow): HTMLElement {
    return h(
      "li",
      {},
      h(
        "div",
        { class: "document", title: one.source },
        h("p", {}, one.title),
        h("p", { class: "faint" }, `${count(one.num_chunks, "passage")}, ${count(one.num_tokens, "token")}`),
      ),
      this.about.can_upload &&
        one.is_file &&
        iconButton(`Read ${one.title} again`, ICONS.again, () => void this.readAgain(one)),
      this.about.can_upload &&
        iconButton(`Delete ${one.title}`, ICONS.trash, () => void this.delete(one)),
    );
  }

  private async delete(one: DocumentRow): Promise<void> {
    const text = "Its passages leave the index. If it was uploaded, its file is deleted, too.";
    if (!(await confirmed(`Delete “${one.title}”?`, text, "Delete"))) return;
    try {
      await call(`${ROOT}?source=${encodeURIComponent(one.source)}`, { method: "DELETE" });
      clear(this.state);
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      clear(this.state, failure(error));
    }
    await this.refresh();
    this.changed();
  }

  private async readAgain(one: DocumentRow): Promise<void> {
    const where = `${ROOT}?source=${encodeURIComponent(one.source)}`;
    await this.adding(one.title, async (tell) => {
      const { num_chunks = 0 } = await send("POST", where, null, tell);
      return num_chunks
        ? `${one.title} has changed, and was read again.`
        : `${one.title} is as it was before.`;
    });
  }

  private async upload(file: File): Promise<void> {
    await this.adding(file.name, async (tell) => {
      await send("PUT", `${ROOT}/${encodeURIComponent(file.name)}`, file, tell);
      return `${file.name} was added.`;
    });
  }

  /** Show the progress of a change that the server makes, and then what `change` says of it. */
  private async adding(name: string, change: (tell: Tell) => Promise<string>): Promise<void> {
    if (this.isAdding) {
      clear(this.state, failure(new Problem("Another document is being added. Wait for it.", 400)));
      return;
    }
    this.isAdding = true;
    const bar = h("progress", { max: 1, "aria-label": `Adding ${name}` });
    const words = h("p", { class: "faint" });
    clear(this.state, h("p", {}, name), bar, words);
    try {
      const said = await change((done, what) => {
        if (done === null) bar.removeAttribute("value");
        else bar.value = done;
        words.textContent = what;
      });
      clear(this.state, h("p", {}, said));
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      clear(this.state, failure(error));
    } finally {
      this.isAdding = false;
    }
    await this.refresh();
    this.changed();
  }
}

/** Takes the share that is done, null while that is unknown, and words. */
type Tell = (done: number | null, what: string) => void;

/** Ask for a change; return its last step. */
async function send(method: string, path: string, file: File | null, tell: Tell): Promise<Step> {
  for (;;) {
    const step = await sendOnce(method, path, file, tell);
    if (step) return step;
    if (!(await newKey())) throw new Problem("The server asks for a key", 401);
  }
}

/** The last step, or null if a key is missing. `fetch` says nothing about what is sent so far. */
function sendOnce(
  method: string,
  path: string,
  file: File | null,
  tell: Tell,
): Promise<Step | null> {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open(method, path);
    for (const [name, value] of Object.entries(authorization())) request.setRequestHeader(name, value);
    request.setRequestHeader("Content-Type", "application/octet-stream");
    request.upload.onprogress = ({ loaded, total }) =>
      tell(loaded / total, `Sending: ${bytes(loaded)} of ${bytes(total)}`);
    request.onprogress = () => {
      if (request.status === 200) tell(...words(lastStep(request.responseText)));
    };
    request.onerror = () => reject(new Problem(NO_SERVER));
    request.onload = () => {
      const { status } = request;
      const step = lastStep(request.responseText);
      if (status === 401) resolve(null);
      else if (status === 200 && step.stage === "done") resolve(step);
      else reject(new Problem(step.error?.message ?? "The document was not added.", status));
    };
    request.send(file);
  });
}

function lastStep(text: string): Step {
  const lines = text.trimEnd().split("\n");
  for (const line of lines.reverse()) {
    try {
      return JSON.parse(line);
    } catch {
      // Half a line: the one before is whole.
    }
  }
  return {};
}

function words({ stage, num_tokens = 0, num_tokens_done = 0 }: Step): [number | null, string] {
  if (stage !== "compute" || !num_tokens) return [null, "Reading"];
  const done = `${num_tokens_done.toLocaleString("en")} of ${count(num_tokens, "token")}`;
  return [num_tokens_done / num_tokens, `Computing: ${done}`];
}
