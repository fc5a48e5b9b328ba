"""Errors of an object store as errors of memstore, each one line without credentials."""

import os
import re

from memstore.errors import MemoryNotFound, MemstoreError, ObjectNotFound, StoreUnavailable

CREDENTIALS = {  # in the environment
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_SECRET = re.compile("KEY|SECRET|TOKEN|PASSWORD|SAS|CREDENTIAL")
_FILE = re.compile("_(FILE|PATH)$|^GOOGLE_APPLICATION_CREDENTIALS$")  # a path of secrets
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "specified bucket does not exist")
_NO_CREDENTIALS = ("169.254.169.254", "latest/api/token", "metadata.google", "redential", "NoAuth")
_REFUSED = ("403 Forbidden", "401 Unauthorized", "AccessDenied", "InvalidAccessKeyId")


def object_error(error: Exception, url: str, name: str) -> MemstoreError:
    """The error for an object, or a prefix of objects, of the object store at a URL."""
    from obstore import exceptions

    text = str(error)
    if any(sign in text for sign in _NO_BUCKET):
        return MemoryNotFound(f"{url}: there is no such bucket; make it, or name another")
    if isinstance(error, (FileNotFoundError, exceptions.NotFoundError)):
        return ObjectNotFound(f"{url}: there is no {name}; another process removed it")
    if any(sign in text for sign in _NO_CREDENTIALS):
        return StoreUnavailable(
            f"{url}: no credentials; set them in the environment, as for the engine's own "
            f"SDK ({CREDENTIALS.get(url.partition(':')[0], 'see docs/sharing.md')}, say)"
        )
    refusals = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError)
    if isinstance(error, refusals) or any(sign in text for sign in _REFUSED):
        return StoreUnavailable(
            f"{url}: access is refused; check the credentials in the environment and the "
            "bucket's policy, or the directory's mode"
        )
    return StoreUnavailable(f"{url}: {first_line(error)}; try again, or check the address")


def first_line(error: Exception) -> str:
    """The first line of a message, without secrets of the environment."""
    text = str(error).strip().split("\n", 1)[0].split(": <?xml")[0]
    secrets = [
        value
        for name, value in os.environ.items()
        if len(value) >= 4 and _SECRET.search(name.upper()) and not _FILE.search(name.upper())
    ]
    for value in sorted(secrets, key=len, reverse=True):  # one may begin with another
        text = text.replace(value, "***")
    return without_credentials(text)[:300].rstrip(".") or type(error).__name__


def without_credentials(text: str) -> str:
    """The text, with users, passwords and queries removed from its URLs."""
    # A password may hold a slash or an @ that should have been encoded.
    text = re.sub(r"(?<=://)([^/\s]*:\S*@|[^/\s]*@)", "", text)
    return re.sub(r"((?<=\w)|(?<=/))\?\S*", "", text)
