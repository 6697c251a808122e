"""What a running server answers."""

import http.client
import urllib.request
from errno import EPROTO
from urllib.error import HTTPError, URLError

PATIENCE_S = 10.0


def ask(url: str, path: str, api_key: str | None = None) -> bytes:
    """The body of its answer to GET. Raises OSError, HTTPError where the status is no success, ValueError for a key
    that is none."""
    headers = bearer(api_key)
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/{path}", headers=headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.read()
    except HTTPError:
        raise
    except (URLError, http.client.HTTPException, ValueError) as error:  # nobody is there, this is no HTTP, or no URL
        raise OSError(f"{getattr(error, 'reason', error)}") from error


def bearer(api_key: str | None) -> dict[str, str]:
    """The header of a key, if there is one. Raises ValueError for what no server takes as a key."""
    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise ValueError("api-key: a key must be printable ASCII, on one line")
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def failed(status: int) -> bool:
    """Whether it is the server that cannot, and not the request that is wrong."""
    return status >= 500 or status == 429


def fault(option: str, url: str, error: OSError) -> Exception:
    """What a command ends with that `ask` raised this for."""
    if isinstance(error, HTTPError) and failed(error.code):
        return OSError(EPROTO, str(error), url)
    return ValueError(f"{option}: {url}: {str(error) or type(error).__name__}")
