// What went wrong, in words, and what to do.

const WORDS = {
  0: "The daemon does not answer. Is `outrider edge` still running?",
  400: "The daemon refuses this request.",
  401: "The daemon wants an API key. Put yours under Settings.",
  403: "This API key may not do that.",
  404: "The daemon does not serve that.",
  413: "The conversation has grown too long. Begin a new chat.",
  422: "The daemon refuses this request.",
  429: "Too much at once.",
  500: "The daemon failed. Its log says why.",
  502: "The cloud gave no proper answer.",
  503: "The cloud cannot be reached just now.",
  504: "The cloud took too long.",
};

export class ApiError extends Error {
  constructor(status, message, code = "", retryAfterS = null) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfterS = retryAfterS;
  }

  static async of(response) {
    const body = await response.text();
    const error = errorIn(body);
    return new ApiError(response.status, error.message, error.code, secondsOf(response.headers.get("Retry-After")));
  }

  static ofEvent(error) {
    const { message, code } = wordsOf(error);
    return new ApiError(Number(error.status ?? error.code) || 500, message, code);
  }

  get asksForTemplate() {
    return this.status >= 400 && this.status < 500 && /no.?chat.?template/i.test(`${this.code} ${this.message}`);
  }

  get words() {
    const parts = [WORDS[this.status] ?? `The daemon answered with status ${this.status}.`];
    if (this.message) parts.push(`“${this.message}”`); // the daemon's own words, which may begin with a field's name
    if (this.retryAfterS !== null) parts.push(`Try again in ${this.retryAfterS} s.`);
    return parts.join(" ");
  }
}

export function inWords(error) {
  if (error instanceof ApiError) return error.words;
  if (error instanceof TypeError) return WORDS[0]; // what fetch throws where nobody listens, or the connection broke
  return `The page could not read the answer: ${error.message}`;
}

function errorIn(body) {
  try {
    return wordsOf(JSON.parse(body).error ?? {});
  } catch {
    return { message: body.slice(0, 300), code: "" };
  }
}

function wordsOf(error) {
  if (typeof error === "string") return { message: error, code: "" };
  return { message: String(error.message ?? ""), code: [error.code, error.type, error.param].filter(Boolean).join(" ") };
}

function secondsOf(retryAfter) {
  if (!retryAfter) return null;
  const seconds = Number(retryAfter);
  const until = Number.isFinite(seconds) ? seconds : (Date.parse(retryAfter) - Date.now()) / 1000;
  return Number.isFinite(until) ? Math.max(1, Math.ceil(until)) : null;
}
