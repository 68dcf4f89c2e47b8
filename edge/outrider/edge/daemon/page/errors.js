// What went wrong, in words, and what to do.

const WORDS = {
  0: "The daemon does not answer. Is `outrider edge` still running?",
  400: "The daemon refuses this request.",
  401: "The daemon wants an API key. Enter yours in the settings.",
  403: "The daemon takes no requests from this page.",
  404: "The daemon does not serve that.",
  413: "The conversation has grown too long. Begin a new chat.",
  429: "Too much at once.",
  500: "The daemon failed. Its log says why.",
  502: "The cloud gave no proper answer.",
  503: "The cloud cannot be reached just now.",
  504: "The cloud took too long.",
};

// An error event in a stream comes after its status; its code stands for that.
const STATUS_OF = { unavailable: 503, deadline_exceeded: 504, rate_limit_exceeded: 429 };

export class ApiError extends Error {
  constructor(status, message, code = "", retryAfterS = null) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfterS = retryAfterS;
  }

  static async of(response) {
    const { message, code } = errorIn(await response.text());
    const retryAfter = response.headers.get("Retry-After");
    return new ApiError(response.status, message, code, retryAfter && Number(retryAfter));
  }

  static ofEvent({ message, code, type }) {
    return new ApiError(STATUS_OF[code] ?? (type === "invalid_request_error" ? 400 : 500), message, code);
  }

  get asksForTemplate() {
    return this.code === "no_chat_template";
  }

  get words() {
    const parts = [WORDS[this.status] ?? `The daemon answered with status ${this.status}.`];
    // The daemon's own words may begin with a field's name; those about a missing key are for programs.
    if (this.message && this.code !== "missing_api_key") parts.push(`“${this.message}”`);
    if (this.retryAfterS !== null) parts.push(`Try again in ${this.retryAfterS} s.`);
    return parts.join(" ");
  }
}

export function inWords(error) {
  if (error instanceof ApiError) return error.words;
  if (error instanceof TypeError) return WORDS[0]; // what fetch throws where nobody listens, or the connection broke
  return `The page could not read the answer: ${error.message}`;
}

// The daemon's error object, or the text of something else that answers in its place, such as a proxy.
function errorIn(body) {
  try {
    return JSON.parse(body).error ?? {};
  } catch {
    return { message: body.slice(0, 300), code: "" };
  }
}
