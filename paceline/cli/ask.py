"""What a running server answers."""

import http.client
import urllib.request
from urllib.error import HTTPError, URLError

PATIENCE_S = 10.0


def ask(url: str, path: str, api_key: str | None = None) -> bytes:
    """The body of its answer to GET. Raises OSError, HTTPError where the status is no success."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/{path}", headers=headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.read()
    except HTTPError:
        raise
    except (URLError, http.client.HTTPException, ValueError) as error:  # nobody is there, this is no HTTP, or no URL
        raise OSError(f"{getattr(error, 'reason', error)}") from error
