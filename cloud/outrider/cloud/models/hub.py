"""One quick question to the model hub before anything loads, in place of its library's minute of retries."""

from __future__ import annotations

import logging

from outrider.proto.errors import ModelRefused, NotFound

ANSWERS_WITHIN_S = 5.0
CONFIG = "config.json"
LOGIN = "log in with `hf auth login`"

log = logging.getLogger(__name__)


def check_hub(name: str) -> None:
    """Refuse a name `ORG/MODEL` unless the hub has the model, or this machine has it from there already.

    Where the hub does not answer, what this machine has is loaded without asking again.

    Raises:
        NotFound: there is no such model, or it is neither here nor within reach.
        ModelRefused: the hub shows it to others only.
    """
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    hub = constants.ENDPOINT
    try:
        here = isinstance(try_to_load_from_cache(name, CONFIG), str)
        if not constants.HF_HUB_OFFLINE:
            HfApi().model_info(name, timeout=ANSWERS_WITHIN_S)
        elif not here:
            raise NotFound(f"{name!r} is not on this machine, and HF_HUB_OFFLINE keeps the hub away", field="target")
    except NotFound:
        raise
    except HFValidationError as error:
        raise NotFound(f"{name!r} is no hub name: {_first_line(error)}", field="target") from error
    except GatedRepoError as error:
        raise ModelRefused(
            f"{name!r} is gated: accept its terms on {hub}/{name}, and {LOGIN}", field="target"
        ) from error
    except RepositoryNotFoundError as error:
        message = f"{hub} has no model {name!r}, or shows it to others only; check the name, or {LOGIN}"
        raise NotFound(message, field="target") from error
    except Exception as error:  # whatever the HTTP library of this release of the hub's raises
        why = f"{hub} cannot be reached: {_first_line(error)}"
        if not here:
            raise NotFound(f"{name!r} is not on this machine, and {why}", field="target") from error
        log.warning("%s; %s is loaded as it is on this machine", why, name)
        constants.HF_HUB_OFFLINE = True  # else each file that a model may have is asked for, again and again


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200] or type(error).__name__
