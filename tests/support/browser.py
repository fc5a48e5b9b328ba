"""A real browser (headless Chromium), driven over the DevTools protocol."""

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

PATIENCE = 60.0  # seconds that something may take on a machine that has other work
_FLAGS = (
    "--headless",
    "--no-sandbox",  # it loads nothing but the page that is tested, and often runs as root
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)


def chromium() -> str | None:
    """The program; None where there is none."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Page:
    """A page of the browser, with its errors and the requests it made."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._number = socket, 0
        self.complaints: list[str] = []  # of the console: errors, warnings, refused by the policy
        self.requests: list[str] = []  # addresses
        self._answers: dict[int, dict[str, Any]] = {}
        for domain in ("Page", "Runtime", "Log", "Network", "DOM"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to a command of the protocol."""
        self._number += 1
        number = self._number
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        until = time.monotonic() + PATIENCE
        while number not in self._answers:
            self._hear(until - time.monotonic())
        answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _hear(self, timeout: float) -> None:
        said = json.loads(self._socket.recv(timeout=max(timeout, 0.01)))
        if "id" in said:
            self._answers[said["id"]] = said
            return
        params = said["params"]
        match said["method"]:
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                what = details.get("exception", {}).get("description", details["text"])
                self.complaints.append(what)
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(json.dumps(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                entry = params["entry"]
                self.complaints.append(f"{entry['text']} {entry.get('url', '')}")

    def ask(self, script: str) -> Any:
        """The value of an expression in the page; a promise is awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, f"{script}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def until(self, script: str, patience: float = PATIENCE) -> Any:
        """The value of an expression once it is true."""
        end = time.monotonic() + patience
        while (value := self.ask(script)) in (None, False, 0, ""):  # an element is {}
            shown = "document.body ? document.body.innerText : ''"
            assert time.monotonic() < end, f"never true: {script}\n{self.ask(shown)}"
            time.sleep(0.05)
        return value

    def open(self, url: str) -> None:
        """Load an address, and wait until its scripts have run."""
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def click(self, selector: str) -> None:
        """Click with the mouse in the middle of an element, scrolled to."""
        at = self.ask(
            f"""(() => {{ const node = document.querySelector({json.dumps(selector)});
            node.scrollIntoView({{ block: 'center' }});
            const box = node.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2]; }})()"""
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], button="left", clickCount=1
            )

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press Tab, Enter or Escape."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27}
        told = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **told, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **told)

    def give_file(self, selector: str, file: Path) -> None:
        """Choose a file in an <input type=file>."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(file)])

    def window(self, width: int, height: int, *, phone: bool = False) -> None:
        """The size of what is shown."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )

    def close(self) -> None:
        """Close the page."""
        self.call("Page.close")


@contextmanager
def browsing(directory: Path) -> Iterator[Callable[[], Page]]:
    """A browser with an empty profile in a directory; what is yielded opens pages."""
    from websockets.sync.client import connect

    program = chromium()
    process = subprocess.Popen(
        [program, *_FLAGS, f"--user-data-dir={directory}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    sockets = ExitStack()

    def dial(address: str) -> Any:
        dialled = connect(address, max_size=None, open_timeout=PATIENCE, proxy=None)
        return sockets.enter_context(dialled)

    try:
        port, path = _told(directory / "DevToolsActivePort", process)
        host = f"ws://127.0.0.1:{port}"
        browser = dial(f"{host}{path}")
        numbers = iter(range(1, 1 << 30))

        def page() -> Page:
            number = next(numbers)
            params = {"url": "about:blank"}
            browser.send(
                json.dumps({"id": number, "method": "Target.createTarget", "params": params})
            )
            while (said := json.loads(browser.recv(timeout=PATIENCE))).get("id") != number:
                pass
            return Page(dial(f"{host}/devtools/page/{said['result']['targetId']}"))

        yield page
    finally:
        sockets.close()
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _told(file: Path, process: "subprocess.Popen[bytes]") -> list[str]:
    """Port and path of the protocol, which the browser writes when it is there."""
    end = time.monotonic() + PATIENCE
    while not file.exists() or len(lines := file.read_text().splitlines()) < 2:
        assert process.poll() is None, f"the browser ended with status {process.returncode}"
        assert time.monotonic() < end, "the browser did not start"
        time.sleep(0.05)
    return lines
