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
  private readonly state = h("ul", { class: "uploads" });
  private dialog: HTMLDialogElement | null = null;
  /** One after another: the server computes one at a time. */
  private last: Promise<void> = Promise.resolve();

  constructor(
    private readonly about: About,
    private readonly changed: () => void,
  ) {
    // Anywhere on the page: else the browser would show the file in the page's place.
    const hasFiles = (event: DragEvent) => event.dataTransfer?.types.includes("Files") ?? false;
    document.addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
    document.addEventListener("drop", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      if (!this.dialog?.open) this.open();
      if (about.can_upload) void this.dropped([...event.dataTransfer!.items]);
    });
  }

  open(): void {
    const { dialog, body } = drawer("Documents");
    this.dialog = dialog;
    this.forget();
    clear(this.list, h("li", { class: "waiting" }, "Loading"));
    const told = h("div", { role: "status" }, this.state);
    body.append(this.about.can_upload ? this.uploading() : this.refusal(), told, this.list);
    void this.refresh();
  }

  /** Forget what was said of changes that are over. */
  private forget(): void {
    for (const row of [...this.state.children]) if (!row.querySelector("progress")) row.remove();
  }

  private refusal(): HTMLElement {
    const { index } = this.about;
    return h(
      "div",
      { class: "upload" },
      h("p", {}, "This server takes no documents from here. Where it runs, this adds a folder:"),
      h("pre", {}, `kvrag ingest FOLDER --index ${index}`),
      h("p", {}, "And this lets everybody add some who may ask:"),
      h("pre", {}, `kvrag serve --index ${index} --allow-upload`),
    );
  }

  private uploading(): HTMLElement {
    const choice = (id: string, label: string, more: Record<string, unknown>) => {
      const input = h("input", {
        id,
        type: "file",
        multiple: true,
        class: "hidden",
        onchange: () => {
          for (const file of input.files ?? []) this.upload(file, file.webkitRelativePath || file.name);
          input.value = "";
        },
        ...more,
      });
      return [input, h("label", { for: id, class: "button" }, label)];
    };
    return h(
      "div",
      { class: "upload drop" },
      h("p", {}, "Drop files or folders here"),
      h(
        "div",
        { class: "actions" },
        ...choice("upload", "Choose files", {}),
        ...choice("upload-folder", "Choose a folder", { webkitdirectory: true }),
      ),
      h("p", { class: "faint" }, "Text, Markdown, HTML, PDF, Word and others, up to 50 MB each."),
    );
  }

  private async dropped(items: DataTransferItem[]): Promise<void> {
    // Both at once: later the browser has forgotten them.
    const found = items.map((one) => [one.webkitGetAsEntry(), one.getAsFile()] as const);
    for (const [entry, file] of found) {
      try {
        if (entry?.isDirectory) for await (const one of filesOf(entry)) this.upload(one, one.path);
        else if (file) this.upload(file, file.name);
      } catch {
        const why = new Problem(`The browser could not read all of ${entry?.name}.`);
        this.state.append(h("li", {}, failure(why)));
      }
    }
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
        iconButton(`Read ${one.title} again`, ICONS.again, () => this.readAgain(one)),
      this.about.can_upload &&
        iconButton(`Delete ${one.title}`, ICONS.trash, () => void this.delete(one)),
    );
  }

  private async delete(one: DocumentRow): Promise<void> {
    const text = "Its passages leave the index. If it was uploaded, its file is deleted, too.";
    if (!(await confirmed(`Delete “${one.title}”?`, text, "Delete"))) return;
    try {
      await call(`${ROOT}?source=${encodeURIComponent(one.source)}`, { method: "DELETE" });
      this.forget();
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      this.state.append(h("li", {}, failure(error)));
    }
    await this.refresh();
    this.changed();
  }

  private readAgain(one: DocumentRow): void {
    this.add(one.title, async (tell) => {
      const where = `${ROOT}?source=${encodeURIComponent(one.source)}`;
      const { num_chunks = 0 } = await send("POST", where, null, tell);
      return num_chunks
        ? `${one.title} has changed, and was read again.`
        : `${one.title} is as it was before.`;
    });
  }

  /** Add a file under its path; names of documents have no slashes. */
  private upload(file: File, path: string): void {
    if (path.split("/").some((part) => part.startsWith("."))) return;
    const name = path.replaceAll("/", " - ");
    this.add(name, async (tell) => {
      await send("PUT", `${ROOT}/${encodeURIComponent(name)}`, file, tell);
      return `${name} was added.`;
    });
  }

  /** Show the progress of a change that the server makes, and then what `change` says of it. */
  private add(name: string, change: (tell: Tell) => Promise<string>): void {
    const bar = h("progress", { max: 1, value: 0, "aria-label": `Adding ${name}` });
    const words = h("p", { class: "faint" }, "Waiting");
    const row = h("li", {}, h("p", {}, name), bar, words);
    this.state.append(row);
    this.last = this.last.then(async () => {
      try {
        const said = await change((done, what) => {
          if (done === null) bar.removeAttribute("value");
          else bar.value = done;
          words.textContent = what;
        });
        clear(row, h("p", {}, said));
      } catch (error) {
        clear(row, failure(error instanceof Problem ? error : new Problem(String(error))));
      }
      await this.refresh();
      this.changed();
    });
  }
}

/** The files in a folder that was dropped, with their paths from there. */
async function* filesOf(entry: FileSystemEntry): AsyncGenerator<File & { path: string }> {
  if (entry.isFile) {
    const file = await new Promise<File>((resolve, reject) => (entry as FileSystemFileEntry).file(resolve, reject));
    yield Object.assign(file, { path: entry.fullPath.slice(1) });
    return;
  }
  const reader = (entry as FileSystemDirectoryEntry).createReader();
  for (;;) {
    const some = await new Promise<FileSystemEntry[]>((resolve, reject) => reader.readEntries(resolve, reject));
    if (some.length === 0) return; // a reader gives a hundred at a time
    for (const one of some) yield* filesOf(one);
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
