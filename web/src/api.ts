// What the page asks the server. Addresses are relative, so that a proxy may add a prefix.

export interface About {
  version: string;
  index: string;
  model: string;
  rag: string;
  is_chat: boolean;
  num_documents: number;
  num_chunks: number;
  num_tokens: number;
  top_k: number;
  max_tokens: number;
  policy: string;
  policies: string[];
  efforts: Effort[];
  examples: string[];
  keeps_history: boolean;
  can_upload: boolean;
}

/** A way to answer, and the seconds that computing takes, if they are known. */
export interface Effort {
  options: Options;
  seconds: number | null;
}

/** A passage, and a sentence of the answer that rests on it: `best` is where its own sentence is. */
export interface Citation {
  start_index: number;
  end_index: number;
  chunk_id: string;
  title: string;
  url: string;
  ordinal: number;
  text: string;
  best?: [number, number] | null;
}

export interface Passages {
  source: string;
  title: string;
  num_chunks: number;
  chunk_id: string;
  passages: {
    chunk_id: string;
    ordinal: number;
    text: string;
    heading: string | null;
    page: string | null;
  }[];
}

export interface Message {
  role: "user" | "assistant";
  content: string;
}

export interface Options {
  policy?: string;
  ratio?: number;
  k?: number;
  reuse?: boolean;
}

/** A request that failed: what to say, and after how many seconds another try makes sense. */
export class Problem extends Error {
  constructor(
    message: string,
    readonly status = 0,
    readonly retryAfter: number | null = null,
  ) {
    super(message);
  }
}

const KEY = "kvrag-key";

/** Asks the person for a key; null if they gave none. Set by the page. */
let askForKey: (wasWrong: boolean) => Promise<string | null> = async () => null;
let asking: Promise<string | null> | null = null;

export function onMissingKey(ask: typeof askForKey): void {
  askForKey = ask;
}

/** The header with the key, which only this tab remembers, and only until it is closed. */
export function authorization(): Record<string, string> {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** Ask for a key after a 401, once for all requests that wait for it; false if there is none. */
export async function newKey(): Promise<boolean> {
  asking ??= askForKey(sessionStorage.getItem(KEY) !== null);
  const key = await asking;
  asking = null;
  if (key === null) return false;
  sessionStorage.setItem(KEY, key);
  return true;
}

export async function problemOf(response: Response): Promise<Problem> {
  let message = `The server answered with status ${response.status}.`;
  try {
    message = (await response.json()).error.message ?? message;
  } catch {
    // A proxy's page: its status says what there is to say.
  }
  const after = Number(response.headers.get("Retry-After"));
  return new Problem(message, response.status, after > 0 ? after : null);
}

export const NO_SERVER = "The server does not answer. Is “kvrag serve” still running?";

/** Send a request; throws a Problem if it is not answered well. */
export async function call(path: string, init: RequestInit = {}): Promise<Response> {
  for (;;) {
    let response: Response;
    try {
      response = await fetch(path, {
        ...init,
        headers: { ...init.headers, ...authorization() },
        credentials: "omit",
      });
    } catch (error) {
      if (error instanceof DOMException && error.name === "AbortError") throw error;
      throw new Problem(NO_SERVER);
    }
    if (response.ok) return response;
    if (response.status === 401 && (await newKey())) continue;
    throw await problemOf(response);
  }
}

export async function getJSON<T>(path: string, signal?: AbortSignal): Promise<T> {
  return (await call(path, { signal })).json();
}

export function sendJSON(path: string, method: string, body: unknown, signal?: AbortSignal) {
  return call(path, {
    method,
    signal,
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
}

/** What full prefill says of an answer. */
export interface Verification {
  answer: string;
  is_same: boolean;
  num_tokens: number;
  num_agreed: number;
  num_same: number;
  instead: string | null;
}

/** The events of a streamed answer; throws a Problem if the stream breaks or reports one. */
export async function* ask(
  model: string,
  messages: Message[],
  maxTokens: number | undefined,
  options: Options,
  signal: AbortSignal,
): AsyncGenerator<any> {
  const response = await sendJSON(
    "v1/chat/completions",
    "POST",
    {
      model,
      messages,
      max_tokens: maxTokens,
      stream: true,
      stream_options: { include_usage: true },
      kvrag: { ...options, report: true, explain: true, found: true },
    },
    signal,
  );
  let buffer = "";
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    let piece: ReadableStreamReadResult<string>;
    try {
      piece = await reader.read();
    } catch (error) {
      if (signal.aborted) throw error;
      throw new Problem("The connection broke before the answer was complete.");
    }
    if (piece.done) throw new Problem("The answer ended early: the server stopped.");
    buffer += piece.value;
    const events = buffer.split("\n\n");
    buffer = events.pop()!;
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      const data = event.slice(6);
      if (data === "[DONE]") return;
      const body = JSON.parse(data);
      if (body.error) throw new Problem(body.error.message, 500);
      yield body;
    }
  }
}
