from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GrammarKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GRAMMAR_KIND_UNSPECIFIED: _ClassVar[GrammarKind]
    GRAMMAR_KIND_JSON_OBJECT: _ClassVar[GrammarKind]
    GRAMMAR_KIND_JSON_SCHEMA: _ClassVar[GrammarKind]
    GRAMMAR_KIND_REGEX: _ClassVar[GrammarKind]
    GRAMMAR_KIND_LARK: _ClassVar[GrammarKind]

class Guarantee(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GUARANTEE_DISTRIBUTION: _ClassVar[Guarantee]
    GUARANTEE_BYTES: _ClassVar[Guarantee]
    GUARANTEE_BYTES_BY_TILES: _ClassVar[Guarantee]

class Goal(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GOAL_UNSPECIFIED: _ClassVar[Goal]
    GOAL_LATENCY: _ClassVar[Goal]
    GOAL_EFFICIENCY: _ClassVar[Goal]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_EOS: _ClassVar[FinishReason]
    FINISH_REASON_STOP_TOKEN: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
    FINISH_REASON_STOP_STRING: _ClassVar[FinishReason]
GRAMMAR_KIND_UNSPECIFIED: GrammarKind
GRAMMAR_KIND_JSON_OBJECT: GrammarKind
GRAMMAR_KIND_JSON_SCHEMA: GrammarKind
GRAMMAR_KIND_REGEX: GrammarKind
GRAMMAR_KIND_LARK: GrammarKind
GUARANTEE_DISTRIBUTION: Guarantee
GUARANTEE_BYTES: Guarantee
GUARANTEE_BYTES_BY_TILES: Guarantee
GOAL_UNSPECIFIED: Goal
GOAL_LATENCY: Goal
GOAL_EFFICIENCY: Goal
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_EOS: FinishReason
FINISH_REASON_STOP_TOKEN: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
FINISH_REASON_STOP_STRING: FinishReason

class EdgeFrame(_message.Message):
    __slots__ = ("open", "draft", "cancel", "report", "continuation", "branches", "ping", "cell", "padding")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    CONTINUATION_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    CELL_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    open: Open
    draft: Draft
    cancel: Cancel
    report: Report
    continuation: Continue
    branches: Branches
    ping: Ping
    cell: Cell
    padding: bytes
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., draft: _Optional[_Union[Draft, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., continuation: _Optional[_Union[Continue, _Mapping]] = ..., branches: _Optional[_Union[Branches, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., cell: _Optional[_Union[Cell, _Mapping]] = ..., padding: _Optional[bytes] = ...) -> None: ...

class CloudFrame(_message.Message):
    __slots__ = ("opened", "commit", "goaway", "pong", "prompt_logprobs", "cell")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    GOAWAY_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CELL_FIELD_NUMBER: _ClassVar[int]
    opened: Opened
    commit: Commit
    goaway: Goaway
    pong: Pong
    prompt_logprobs: PromptLogprobs
    cell: Cell
    def __init__(self, opened: _Optional[_Union[Opened, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., goaway: _Optional[_Union[Goaway, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., cell: _Optional[_Union[Cell, _Mapping]] = ...) -> None: ...

class Cell(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class QuietWire(_message.Message):
    __slots__ = ("up_bytes", "down_bytes")
    UP_BYTES_FIELD_NUMBER: _ClassVar[int]
    DOWN_BYTES_FIELD_NUMBER: _ClassVar[int]
    up_bytes: int
    down_bytes: int
    def __init__(self, up_bytes: _Optional[int] = ..., down_bytes: _Optional[int] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "seed", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "bias_tokens", "bias_values", "allowed_tokens", "max_tokens", "stop_tokens", "ignore_eos", "grammar", "noise", "min_tokens", "no_repeat_ngram_size")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    NOISE_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NO_REPEAT_NGRAM_SIZE_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    seed: int
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    bias_tokens: _containers.RepeatedScalarFieldContainer[int]
    bias_values: _containers.RepeatedScalarFieldContainer[float]
    allowed_tokens: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    stop_tokens: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    grammar: Grammar
    noise: int
    min_tokens: int
    no_repeat_ngram_size: int
    def __init__(self, temperature: _Optional[float] = ..., seed: _Optional[int] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., bias_tokens: _Optional[_Iterable[int]] = ..., bias_values: _Optional[_Iterable[float]] = ..., allowed_tokens: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., stop_tokens: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., noise: _Optional[int] = ..., min_tokens: _Optional[int] = ..., no_repeat_ngram_size: _Optional[int] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: GrammarKind
    text: str
    def __init__(self, kind: _Optional[_Union[GrammarKind, str]] = ..., text: _Optional[str] = ...) -> None: ...

class Patience(_message.Message):
    __slots__ = ("seconds", "drafts")
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    drafts: int
    def __init__(self, seconds: _Optional[float] = ..., drafts: _Optional[int] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("protocol_version", "lease", "session", "model", "tokenizer_sha256", "sampling", "prompt", "committed", "patience", "drafting", "window", "max_drafts", "logp", "logprobs", "top_logprobs", "keep_s", "steering", "drafts_here", "learning", "epoch", "prompt_logprobs", "trees", "isolation", "prompt_logprobs_from", "context_length", "service", "quiet")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    LOGP_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    KEEP_S_FIELD_NUMBER: _ClassVar[int]
    STEERING_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_HERE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TREES_FIELD_NUMBER: _ClassVar[int]
    ISOLATION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FROM_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    QUIET_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    lease: bytes
    session: str
    model: str
    tokenizer_sha256: str
    sampling: Sampling
    prompt: _containers.RepeatedScalarFieldContainer[int]
    committed: _containers.RepeatedScalarFieldContainer[int]
    patience: Patience
    drafting: bool
    window: int
    max_drafts: int
    logp: bool
    logprobs: bool
    top_logprobs: int
    keep_s: float
    steering: SteeringRequest
    drafts_here: int
    learning: Learning
    epoch: int
    prompt_logprobs: int
    trees: bool
    isolation: bytes
    prompt_logprobs_from: int
    context_length: int
    service: ServiceGoal
    quiet: QuietWire
    def __init__(self, protocol_version: _Optional[int] = ..., lease: _Optional[bytes] = ..., session: _Optional[str] = ..., model: _Optional[str] = ..., tokenizer_sha256: _Optional[str] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., prompt: _Optional[_Iterable[int]] = ..., committed: _Optional[_Iterable[int]] = ..., patience: _Optional[_Union[Patience, _Mapping]] = ..., drafting: _Optional[bool] = ..., window: _Optional[int] = ..., max_drafts: _Optional[int] = ..., logp: _Optional[bool] = ..., logprobs: _Optional[bool] = ..., top_logprobs: _Optional[int] = ..., keep_s: _Optional[float] = ..., steering: _Optional[_Union[SteeringRequest, _Mapping]] = ..., drafts_here: _Optional[int] = ..., learning: _Optional[_Union[Learning, _Mapping]] = ..., epoch: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., trees: _Optional[bool] = ..., isolation: _Optional[bytes] = ..., prompt_logprobs_from: _Optional[int] = ..., context_length: _Optional[int] = ..., service: _Optional[_Union[ServiceGoal, _Mapping]] = ..., quiet: _Optional[_Union[QuietWire, _Mapping]] = ...) -> None: ...

class ServiceGoal(_message.Message):
    __slots__ = ("batch", "gap_s", "first_token_s")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    GAP_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    batch: bool
    gap_s: float
    first_token_s: float
    def __init__(self, batch: _Optional[bool] = ..., gap_s: _Optional[float] = ..., first_token_s: _Optional[float] = ...) -> None: ...

class Learning(_message.Message):
    __slots__ = ("prompt_class",)
    PROMPT_CLASS_FIELD_NUMBER: _ClassVar[int]
    prompt_class: int
    def __init__(self, prompt_class: _Optional[int] = ...) -> None: ...

class SteeringRequest(_message.Message):
    __slots__ = ("projection", "precision", "every")
    PROJECTION_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    EVERY_FIELD_NUMBER: _ClassVar[int]
    projection: str
    precision: Steering.Precision
    every: int
    def __init__(self, projection: _Optional[str] = ..., precision: _Optional[_Union[Steering.Precision, str]] = ..., every: _Optional[int] = ...) -> None: ...

class Continue(_message.Message):
    __slots__ = ("start", "prompt", "sampling", "chain")
    START_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    start: int
    prompt: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    chain: int
    def __init__(self, start: _Optional[int] = ..., prompt: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., chain: _Optional[int] = ...) -> None: ...

class Draft(_message.Message):
    __slots__ = ("chain", "start", "tokens", "q", "drafter", "drafter_version", "complete", "branches")
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    Q_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    chain: int
    start: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    q: bytes
    drafter: str
    drafter_version: str
    complete: bool
    branches: Branches
    def __init__(self, chain: _Optional[int] = ..., start: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., q: _Optional[bytes] = ..., drafter: _Optional[str] = ..., drafter_version: _Optional[str] = ..., complete: _Optional[bool] = ..., branches: _Optional[_Union[Branches, _Mapping]] = ...) -> None: ...

class Branches(_message.Message):
    __slots__ = ("chain", "starts", "lengths", "tokens", "chances")
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHANCES_FIELD_NUMBER: _ClassVar[int]
    chain: int
    starts: _containers.RepeatedScalarFieldContainer[int]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    chances: bytes
    def __init__(self, chain: _Optional[int] = ..., starts: _Optional[_Iterable[int]] = ..., lengths: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., chances: _Optional[bytes] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("drafting", "drafting_us", "round_trip_us", "acceptance", "steering")
    DRAFTING_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_US_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_US_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    STEERING_FIELD_NUMBER: _ClassVar[int]
    drafting: bool
    drafting_us: int
    round_trip_us: int
    acceptance: float
    steering: SteeringRequest
    def __init__(self, drafting: _Optional[bool] = ..., drafting_us: _Optional[int] = ..., round_trip_us: _Optional[int] = ..., acceptance: _Optional[float] = ..., steering: _Optional[_Union[SteeringRequest, _Mapping]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("number", "epoch")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    number: int
    epoch: int
    def __init__(self, number: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("committed", "credit", "max_tokens", "verifier", "context_length", "guarantee", "vocab_size", "goal", "max_drafts", "planned", "keep_s", "release", "steered", "noise", "drafter_here", "branches", "precision", "epoch", "eos_tokens", "trees", "settings")
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    GUARANTEE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    GOAL_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    PLANNED_FIELD_NUMBER: _ClassVar[int]
    KEEP_S_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    STEERED_FIELD_NUMBER: _ClassVar[int]
    NOISE_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_HERE_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TREES_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    committed: int
    credit: int
    max_tokens: int
    verifier: str
    context_length: int
    guarantee: Guarantee
    vocab_size: int
    goal: Goal
    max_drafts: int
    planned: bool
    keep_s: float
    release: str
    steered: bool
    noise: int
    drafter_here: str
    branches: bool
    precision: str
    epoch: int
    eos_tokens: _containers.RepeatedScalarFieldContainer[int]
    trees: bool
    settings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, committed: _Optional[int] = ..., credit: _Optional[int] = ..., max_tokens: _Optional[int] = ..., verifier: _Optional[str] = ..., context_length: _Optional[int] = ..., guarantee: _Optional[_Union[Guarantee, str]] = ..., vocab_size: _Optional[int] = ..., goal: _Optional[_Union[Goal, str]] = ..., max_drafts: _Optional[int] = ..., planned: _Optional[bool] = ..., keep_s: _Optional[float] = ..., release: _Optional[str] = ..., steered: _Optional[bool] = ..., noise: _Optional[int] = ..., drafter_here: _Optional[str] = ..., branches: _Optional[bool] = ..., precision: _Optional[str] = ..., epoch: _Optional[int] = ..., eos_tokens: _Optional[_Iterable[int]] = ..., trees: _Optional[bool] = ..., settings: _Optional[_Iterable[str]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("start", "logprobs", "ranks", "top_tokens", "top_logp", "epoch", "entropies")
    START_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ENTROPIES_FIELD_NUMBER: _ClassVar[int]
    start: int
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    top_tokens: _containers.RepeatedScalarFieldContainer[int]
    top_logp: _containers.RepeatedScalarFieldContainer[float]
    epoch: int
    entropies: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, start: _Optional[int] = ..., logprobs: _Optional[_Iterable[float]] = ..., ranks: _Optional[_Iterable[int]] = ..., top_tokens: _Optional[_Iterable[int]] = ..., top_logp: _Optional[_Iterable[float]] = ..., epoch: _Optional[int] = ..., entropies: _Optional[_Iterable[float]] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("start", "tokens", "accepted", "logp", "reward", "steering", "credit", "timing", "finish", "chain", "verified", "logprobs", "top_tokens", "top_logp", "turn", "cached_tokens", "verified_here", "covered", "epoch", "verified_beside", "ranks", "entropies")
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    LOGP_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    STEERING_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGP_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_HERE_FIELD_NUMBER: _ClassVar[int]
    COVERED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_BESIDE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ENTROPIES_FIELD_NUMBER: _ClassVar[int]
    start: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    accepted: int
    logp: _containers.RepeatedScalarFieldContainer[float]
    reward: float
    steering: Steering
    credit: int
    timing: Timing
    finish: FinishReason
    chain: int
    verified: int
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_tokens: _containers.RepeatedScalarFieldContainer[int]
    top_logp: _containers.RepeatedScalarFieldContainer[float]
    turn: int
    cached_tokens: int
    verified_here: int
    covered: int
    epoch: int
    verified_beside: int
    ranks: _containers.RepeatedScalarFieldContainer[int]
    entropies: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, start: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., accepted: _Optional[int] = ..., logp: _Optional[_Iterable[float]] = ..., reward: _Optional[float] = ..., steering: _Optional[_Union[Steering, _Mapping]] = ..., credit: _Optional[int] = ..., timing: _Optional[_Union[Timing, _Mapping]] = ..., finish: _Optional[_Union[FinishReason, str]] = ..., chain: _Optional[int] = ..., verified: _Optional[int] = ..., logprobs: _Optional[_Iterable[float]] = ..., top_tokens: _Optional[_Iterable[int]] = ..., top_logp: _Optional[_Iterable[float]] = ..., turn: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., verified_here: _Optional[int] = ..., covered: _Optional[int] = ..., epoch: _Optional[int] = ..., verified_beside: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ..., entropies: _Optional[_Iterable[float]] = ...) -> None: ...

class Steering(_message.Message):
    __slots__ = ("scale", "values", "precision")
    class Precision(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PRECISION_UNSPECIFIED: _ClassVar[Steering.Precision]
        PRECISION_FLOAT16: _ClassVar[Steering.Precision]
        PRECISION_INT8: _ClassVar[Steering.Precision]
    PRECISION_UNSPECIFIED: Steering.Precision
    PRECISION_FLOAT16: Steering.Precision
    PRECISION_INT8: Steering.Precision
    SCALE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    scale: float
    values: bytes
    precision: Steering.Precision
    def __init__(self, scale: _Optional[float] = ..., values: _Optional[bytes] = ..., precision: _Optional[_Union[Steering.Precision, str]] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("echo", "hold_us", "queue_us", "verify_us", "drafting_us")
    ECHO_FIELD_NUMBER: _ClassVar[int]
    HOLD_US_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    VERIFY_US_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_US_FIELD_NUMBER: _ClassVar[int]
    echo: int
    hold_us: int
    queue_us: int
    verify_us: int
    drafting_us: int
    def __init__(self, echo: _Optional[int] = ..., hold_us: _Optional[int] = ..., queue_us: _Optional[int] = ..., verify_us: _Optional[int] = ..., drafting_us: _Optional[int] = ...) -> None: ...

class Goaway(_message.Message):
    __slots__ = ("reason", "retry_after_s", "epoch")
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    reason: str
    retry_after_s: float
    epoch: int
    def __init__(self, reason: _Optional[str] = ..., retry_after_s: _Optional[float] = ..., epoch: _Optional[int] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("kind", "message", "field", "retry_after_s")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    kind: str
    message: str
    field: str
    retry_after_s: float
    def __init__(self, kind: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("model", "tokenizer_sha256", "session", "avoid", "protocol_version", "inquiry", "prompt_class", "link_class", "prefixes", "precision", "epoch", "suspected", "context_length", "service")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    AVOID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INQUIRY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_CLASS_FIELD_NUMBER: _ClassVar[int]
    LINK_CLASS_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SUSPECTED_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    model: str
    tokenizer_sha256: str
    session: str
    avoid: _containers.RepeatedScalarFieldContainer[str]
    protocol_version: int
    inquiry: bool
    prompt_class: int
    link_class: int
    prefixes: _containers.RepeatedScalarFieldContainer[int]
    precision: str
    epoch: int
    suspected: bool
    context_length: int
    service: ServiceGoal
    def __init__(self, model: _Optional[str] = ..., tokenizer_sha256: _Optional[str] = ..., session: _Optional[str] = ..., avoid: _Optional[_Iterable[str]] = ..., protocol_version: _Optional[int] = ..., inquiry: _Optional[bool] = ..., prompt_class: _Optional[int] = ..., link_class: _Optional[int] = ..., prefixes: _Optional[_Iterable[int]] = ..., precision: _Optional[str] = ..., epoch: _Optional[int] = ..., suspected: _Optional[bool] = ..., context_length: _Optional[int] = ..., service: _Optional[_Union[ServiceGoal, _Mapping]] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("token", "verifier", "address", "expires_in_s", "model", "tokenizer_sha256", "drafters", "tokenizer", "prior", "chat_template", "tls", "tls_name", "relayed", "release", "context_length", "ask_again_s", "service", "service_unkept")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    PRIOR_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    TLS_FIELD_NUMBER: _ClassVar[int]
    TLS_NAME_FIELD_NUMBER: _ClassVar[int]
    RELAYED_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    ASK_AGAIN_S_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    SERVICE_UNKEPT_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    verifier: str
    address: str
    expires_in_s: float
    model: str
    tokenizer_sha256: str
    drafters: _containers.RepeatedCompositeFieldContainer[DrafterManifest]
    tokenizer: RemoteFile
    prior: DraftingPrior
    chat_template: RemoteFile
    tls: bool
    tls_name: str
    relayed: bool
    release: str
    context_length: int
    ask_again_s: float
    service: ServiceGoal
    service_unkept: bool
    def __init__(self, token: _Optional[bytes] = ..., verifier: _Optional[str] = ..., address: _Optional[str] = ..., expires_in_s: _Optional[float] = ..., model: _Optional[str] = ..., tokenizer_sha256: _Optional[str] = ..., drafters: _Optional[_Iterable[_Union[DrafterManifest, _Mapping]]] = ..., tokenizer: _Optional[_Union[RemoteFile, _Mapping]] = ..., prior: _Optional[_Union[DraftingPrior, _Mapping]] = ..., chat_template: _Optional[_Union[RemoteFile, _Mapping]] = ..., tls: _Optional[bool] = ..., tls_name: _Optional[str] = ..., relayed: _Optional[bool] = ..., release: _Optional[str] = ..., context_length: _Optional[int] = ..., ask_again_s: _Optional[float] = ..., service: _Optional[_Union[ServiceGoal, _Mapping]] = ..., service_unkept: _Optional[bool] = ...) -> None: ...

class DraftingPrior(_message.Message):
    __slots__ = ("drafters",)
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    drafters: _containers.RepeatedCompositeFieldContainer[DrafterPrior]
    def __init__(self, drafters: _Optional[_Iterable[_Union[DrafterPrior, _Mapping]]] = ...) -> None: ...

class DrafterPrior(_message.Message):
    __slots__ = ("drafter", "drafter_version", "acceptance", "trials")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    TRIALS_FIELD_NUMBER: _ClassVar[int]
    drafter: str
    drafter_version: str
    acceptance: float
    trials: float
    def __init__(self, drafter: _Optional[str] = ..., drafter_version: _Optional[str] = ..., acceptance: _Optional[float] = ..., trials: _Optional[float] = ...) -> None: ...

class RemoteFile(_message.Message):
    __slots__ = ("name", "sha256", "bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    sha256: str
    bytes: int
    def __init__(self, name: _Optional[str] = ..., sha256: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class DrafterManifest(_message.Message):
    __slots__ = ("name", "version", "tokenizer_sha256", "target", "files", "share")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    tokenizer_sha256: str
    target: str
    files: _containers.RepeatedCompositeFieldContainer[RemoteFile]
    share: float
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., tokenizer_sha256: _Optional[str] = ..., target: _Optional[str] = ..., files: _Optional[_Iterable[_Union[RemoteFile, _Mapping]]] = ..., share: _Optional[float] = ...) -> None: ...

class ListDraftersRequest(_message.Message):
    __slots__ = ("tokenizer_sha256",)
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    tokenizer_sha256: str
    def __init__(self, tokenizer_sha256: _Optional[str] = ...) -> None: ...

class ListDraftersReply(_message.Message):
    __slots__ = ("drafters",)
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    drafters: _containers.RepeatedCompositeFieldContainer[DrafterManifest]
    def __init__(self, drafters: _Optional[_Iterable[_Union[DrafterManifest, _Mapping]]] = ...) -> None: ...

class FetchFileRequest(_message.Message):
    __slots__ = ("sha256", "offset")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    offset: int
    def __init__(self, sha256: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class FileChunk(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class SessionReport(_message.Message):
    __slots__ = ("session", "model", "verifier", "drafter", "drafter_version", "committed_tokens", "accepted_tokens", "drafted_tokens", "steps", "seconds", "uplink_bytes", "downlink_bytes", "resumes", "round_trip_s", "verified_tokens", "edge", "drafter_hits", "prompt_class", "link_class")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    UPLINK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DOWNLINK_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESUMES_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_S_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EDGE_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_HITS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_CLASS_FIELD_NUMBER: _ClassVar[int]
    LINK_CLASS_FIELD_NUMBER: _ClassVar[int]
    session: str
    model: str
    verifier: str
    drafter: str
    drafter_version: str
    committed_tokens: int
    accepted_tokens: int
    drafted_tokens: int
    steps: int
    seconds: float
    uplink_bytes: int
    downlink_bytes: int
    resumes: int
    round_trip_s: float
    verified_tokens: int
    edge: str
    drafter_hits: _containers.RepeatedCompositeFieldContainer[DrafterHits]
    prompt_class: int
    link_class: int
    def __init__(self, session: _Optional[str] = ..., model: _Optional[str] = ..., verifier: _Optional[str] = ..., drafter: _Optional[str] = ..., drafter_version: _Optional[str] = ..., committed_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., steps: _Optional[int] = ..., seconds: _Optional[float] = ..., uplink_bytes: _Optional[int] = ..., downlink_bytes: _Optional[int] = ..., resumes: _Optional[int] = ..., round_trip_s: _Optional[float] = ..., verified_tokens: _Optional[int] = ..., edge: _Optional[str] = ..., drafter_hits: _Optional[_Iterable[_Union[DrafterHits, _Mapping]]] = ..., prompt_class: _Optional[int] = ..., link_class: _Optional[int] = ...) -> None: ...

class DrafterHits(_message.Message):
    __slots__ = ("drafter", "drafter_version", "hits", "compared", "draft_s")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    COMPARED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_S_FIELD_NUMBER: _ClassVar[int]
    drafter: str
    drafter_version: str
    hits: int
    compared: int
    draft_s: float
    def __init__(self, drafter: _Optional[str] = ..., drafter_version: _Optional[str] = ..., hits: _Optional[int] = ..., compared: _Optional[int] = ..., draft_s: _Optional[float] = ...) -> None: ...

class SessionReportReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchDraftersRequest(_message.Message):
    __slots__ = ("tokenizer_sha256",)
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    tokenizer_sha256: str
    def __init__(self, tokenizer_sha256: _Optional[str] = ...) -> None: ...

class DrafterUpdate(_message.Message):
    __slots__ = ("drafters",)
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    drafters: _containers.RepeatedCompositeFieldContainer[DrafterManifest]
    def __init__(self, drafters: _Optional[_Iterable[_Union[DrafterManifest, _Mapping]]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifierStatus(_message.Message):
    __slots__ = ("name", "address", "model", "state", "sessions", "step_s", "restarts", "kv_pages_free", "release", "max_sessions", "kv_pages", "guarantee", "precision", "drafter_here", "committed_tokens", "drafted_here", "verified_here", "accepted_here", "drafting_here_s", "context_length", "server", "gap_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    KV_PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    KV_PAGES_FIELD_NUMBER: _ClassVar[int]
    GUARANTEE_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_HERE_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_HERE_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_HERE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_HERE_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_HERE_S_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    GAP_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    model: str
    state: str
    sessions: int
    step_s: float
    restarts: int
    kv_pages_free: int
    release: str
    max_sessions: int
    kv_pages: int
    guarantee: str
    precision: str
    drafter_here: str
    committed_tokens: int
    drafted_here: int
    verified_here: int
    accepted_here: int
    drafting_here_s: float
    context_length: int
    server: str
    gap_s: float
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., model: _Optional[str] = ..., state: _Optional[str] = ..., sessions: _Optional[int] = ..., step_s: _Optional[float] = ..., restarts: _Optional[int] = ..., kv_pages_free: _Optional[int] = ..., release: _Optional[str] = ..., max_sessions: _Optional[int] = ..., kv_pages: _Optional[int] = ..., guarantee: _Optional[str] = ..., precision: _Optional[str] = ..., drafter_here: _Optional[str] = ..., committed_tokens: _Optional[int] = ..., drafted_here: _Optional[int] = ..., verified_here: _Optional[int] = ..., accepted_here: _Optional[int] = ..., drafting_here_s: _Optional[float] = ..., context_length: _Optional[int] = ..., server: _Optional[str] = ..., gap_s: _Optional[float] = ...) -> None: ...

class EdgeStatus(_message.Message):
    __slots__ = ("edge", "last", "age_s", "sessions")
    EDGE_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    edge: str
    last: SessionReport
    age_s: float
    sessions: int
    def __init__(self, edge: _Optional[str] = ..., last: _Optional[_Union[SessionReport, _Mapping]] = ..., age_s: _Optional[float] = ..., sessions: _Optional[int] = ...) -> None: ...

class RelayStatus(_message.Message):
    __slots__ = ("streams", "streams_total", "refused", "broken", "uplink_bytes", "downlink_bytes", "forward_p50_s", "forward_p99_s")
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    STREAMS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    UPLINK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DOWNLINK_BYTES_FIELD_NUMBER: _ClassVar[int]
    FORWARD_P50_S_FIELD_NUMBER: _ClassVar[int]
    FORWARD_P99_S_FIELD_NUMBER: _ClassVar[int]
    streams: int
    streams_total: int
    refused: int
    broken: int
    uplink_bytes: int
    downlink_bytes: int
    forward_p50_s: float
    forward_p99_s: float
    def __init__(self, streams: _Optional[int] = ..., streams_total: _Optional[int] = ..., refused: _Optional[int] = ..., broken: _Optional[int] = ..., uplink_bytes: _Optional[int] = ..., downlink_bytes: _Optional[int] = ..., forward_p50_s: _Optional[float] = ..., forward_p99_s: _Optional[float] = ...) -> None: ...

class ClusterStatus(_message.Message):
    __slots__ = ("verifiers", "drafters", "leases_granted", "recent", "relay", "edges", "acceptance", "versions", "trainers", "release")
    VERIFIERS_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    LEASES_GRANTED_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    RELAY_FIELD_NUMBER: _ClassVar[int]
    EDGES_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    TRAINERS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    verifiers: _containers.RepeatedCompositeFieldContainer[VerifierStatus]
    drafters: _containers.RepeatedCompositeFieldContainer[DrafterManifest]
    leases_granted: int
    recent: _containers.RepeatedCompositeFieldContainer[SessionReport]
    relay: RelayStatus
    edges: _containers.RepeatedCompositeFieldContainer[EdgeStatus]
    acceptance: _containers.RepeatedCompositeFieldContainer[ClassAcceptance]
    versions: _containers.RepeatedCompositeFieldContainer[VersionStatus]
    trainers: _containers.RepeatedCompositeFieldContainer[TrainerStatus]
    release: str
    def __init__(self, verifiers: _Optional[_Iterable[_Union[VerifierStatus, _Mapping]]] = ..., drafters: _Optional[_Iterable[_Union[DrafterManifest, _Mapping]]] = ..., leases_granted: _Optional[int] = ..., recent: _Optional[_Iterable[_Union[SessionReport, _Mapping]]] = ..., relay: _Optional[_Union[RelayStatus, _Mapping]] = ..., edges: _Optional[_Iterable[_Union[EdgeStatus, _Mapping]]] = ..., acceptance: _Optional[_Iterable[_Union[ClassAcceptance, _Mapping]]] = ..., versions: _Optional[_Iterable[_Union[VersionStatus, _Mapping]]] = ..., trainers: _Optional[_Iterable[_Union[TrainerStatus, _Mapping]]] = ..., release: _Optional[str] = ...) -> None: ...

class TrainerStatus(_message.Message):
    __slots__ = ("model", "state", "drafter", "version", "sequence", "load", "waited_s", "hurried", "cpu_share", "max_cpu_share", "steps", "positions", "keys", "waiting", "candidate", "candidate_texts", "candidate_difference", "published", "dropped")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    HURRIED_FIELD_NUMBER: _ClassVar[int]
    CPU_SHARE_FIELD_NUMBER: _ClassVar[int]
    MAX_CPU_SHARE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_TEXTS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    model: str
    state: str
    drafter: str
    version: str
    sequence: int
    load: float
    waited_s: float
    hurried: int
    cpu_share: float
    max_cpu_share: float
    steps: int
    positions: int
    keys: int
    waiting: int
    candidate: int
    candidate_texts: int
    candidate_difference: float
    published: int
    dropped: int
    def __init__(self, model: _Optional[str] = ..., state: _Optional[str] = ..., drafter: _Optional[str] = ..., version: _Optional[str] = ..., sequence: _Optional[int] = ..., load: _Optional[float] = ..., waited_s: _Optional[float] = ..., hurried: _Optional[int] = ..., cpu_share: _Optional[float] = ..., max_cpu_share: _Optional[float] = ..., steps: _Optional[int] = ..., positions: _Optional[int] = ..., keys: _Optional[int] = ..., waiting: _Optional[int] = ..., candidate: _Optional[int] = ..., candidate_texts: _Optional[int] = ..., candidate_difference: _Optional[float] = ..., published: _Optional[int] = ..., dropped: _Optional[int] = ...) -> None: ...

class VersionStatus(_message.Message):
    __slots__ = ("drafter", "version", "state", "share", "why", "age_s", "against", "texts", "difference", "evidence", "acceptance", "trials")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    AGAINST_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    TRIALS_FIELD_NUMBER: _ClassVar[int]
    drafter: str
    version: str
    state: str
    share: float
    why: str
    age_s: float
    against: str
    texts: int
    difference: float
    evidence: float
    acceptance: float
    trials: float
    def __init__(self, drafter: _Optional[str] = ..., version: _Optional[str] = ..., state: _Optional[str] = ..., share: _Optional[float] = ..., why: _Optional[str] = ..., age_s: _Optional[float] = ..., against: _Optional[str] = ..., texts: _Optional[int] = ..., difference: _Optional[float] = ..., evidence: _Optional[float] = ..., acceptance: _Optional[float] = ..., trials: _Optional[float] = ...) -> None: ...

class ClassAcceptance(_message.Message):
    __slots__ = ("model", "prompt_class", "link_class", "prior")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_CLASS_FIELD_NUMBER: _ClassVar[int]
    LINK_CLASS_FIELD_NUMBER: _ClassVar[int]
    PRIOR_FIELD_NUMBER: _ClassVar[int]
    model: str
    prompt_class: int
    link_class: int
    prior: DrafterPrior
    def __init__(self, model: _Optional[str] = ..., prompt_class: _Optional[int] = ..., link_class: _Optional[int] = ..., prior: _Optional[_Union[DrafterPrior, _Mapping]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("verifier",)
    VERIFIER_FIELD_NUMBER: _ClassVar[int]
    verifier: str
    def __init__(self, verifier: _Optional[str] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    def __init__(self, sessions: _Optional[int] = ...) -> None: ...
