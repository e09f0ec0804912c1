"""Tests of the server need Starlette, which `make test-oldest` does not install."""

from importlib.util import find_spec

NEEDED = ("starlette", "uvicorn", "httpx")
collect_ignore = [] if all(map(find_spec, NEEDED)) else ["test_page.py", "test_server.py"]
