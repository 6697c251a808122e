"""Where models come from: `builtin:NAME`, a local directory, or a hub id."""

from pathlib import Path

BUILTIN = Path(__file__).parents[1] / "builtin"
NEEDED = "*.json", "*.safetensors", "*.jinja"  # configuration, tokenizer and weights; nothing that could run


def builtin_names() -> list[str]:
    return sorted(path.parent.name for path in BUILTIN.glob("*/config.json"))


def resolve(source: str, *needed: str) -> Path:
    """The directory of a checkpoint; of a hub repository's files those `needed`, such as "*.json", or all that serving
    takes. Raises ValueError with one line that names the source and what would be valid."""
    if source.startswith("builtin:"):
        name = source.removeprefix("builtin:")
        if name not in builtin_names():
            raise ValueError(f"source: no model {source!r}; built in are {', '.join(builtin_names())}")
        return BUILTIN / name
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"source: {source!r} has no config.json; give a directory with a Hugging Face checkpoint")
        return path
    if path.is_file():
        raise ValueError(
            f"source: {source!r} is a file; valid are a checkpoint's directory or, alone, a fleet file (*.yaml, *.yml)"
        )
    if source.count("/") == 1 and not source.startswith((".", "/", "~")):
        return _download(source, needed or NEEDED)
    raise ValueError(f"source: {source!r} is neither builtin:NAME, nor a directory, nor a hub id (OWNER/NAME)")


def _download(repository: str, needed: tuple[str, ...]) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError:
        raise ValueError(
            f"source: no directory {repository!r}; to load it from the hub, install paceline[hub]"
        ) from None
    try:
        return Path(snapshot_download(repository, allow_patterns=list(needed)))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ValueError(f"source: cannot get {repository!r} from the hub: {error}") from error


def default_name(source: str) -> str:
    """What clients call the model unless told otherwise."""
    return source.removeprefix("builtin:") if source.startswith("builtin:") else Path(source).name or source
