"""A headless Chromium that tests steer over its debugging pipe: no driver and no port."""

import base64
import contextlib
import fcntl
import functools
import http.server
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Chromium:
    """One browser with one page. Everything that waits gives up after ``timeout_s``."""

    def __init__(self, timeout_s=60, width=1400, height=900):
        self._timeout_s = timeout_s
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        inner, self._write = os.pipe()
        self._read, outer = os.pipe()
        # The browser reads from 3 and writes to 4: the pipes get numbers that are not these.
        to_browser, from_browser = (fcntl.fcntl(one, fcntl.F_DUPFD, 20) for one in (inner, outer))
        os.close(inner)
        os.close(outer)
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={self._profile}",
                 "--no-first-run", "--disable-extensions", "--disable-background-networking", "--mute-audio",
                 "--disable-dev-shm-usage", f"--window-size={width},{height}", "about:blank"]
        shell = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$@"'
        self._process = subprocess.Popen(["bash", "-c", shell, "bash", PROGRAM, *flags], pass_fds=(to_browser, from_browser),
                                         stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        self._answers, self._changed, self._number = {}, threading.Condition(), 0
        self.messages = []  # what the console and the network said
        threading.Thread(target=self._listen, daemon=True).start()
        target = self._ask("Target.createTarget", {"url": "about:blank"}, session=False)["targetId"]
        self._session = self._ask("Target.attachToTarget", {"targetId": target, "flatten": True}, session=False)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._ask(f"{domain}.enable", {})

    _session = None

    def _listen(self):
        buffer = b""
        with contextlib.suppress(OSError):
            while piece := os.read(self._read, 1 << 20):
                buffer += piece
                *whole, buffer = buffer.split(b"\0")
                for one in whole:
                    message = json.loads(one)
                    with self._changed:
                        if "id" in message:
                            self._answers[message["id"]] = message
                        else:
                            self.messages.append(message)
                        self._changed.notify_all()

    def _ask(self, method, params, session=True):
        with self._changed:
            self._number += 1
            number = self._number
        message = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        with self._changed:
            assert self._changed.wait_for(lambda: number in self._answers, self._timeout_s), f"{method}: no answer"
            answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def before_scripts(self, script):
        """Run ``script`` in every page before its own."""
        self._ask("Page.addScriptToEvaluateOnNewDocument", {"source": script})

    def colour_scheme(self, name):
        """Prefer ``light`` or ``dark``."""
        self._ask("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": name}]})

    def open(self, url):
        self._ask("Page.navigate", {"url": url})
        self.until("document.readyState == 'complete'")

    def run(self, expression):
        """The value of a JavaScript expression, or of what it promises."""
        result = self._ask("Runtime.evaluate", {"expression": expression, "awaitPromise": True, "returnByValue": True})
        assert "exceptionDetails" not in result, str(result["exceptionDetails"])[:2000]
        return result["result"].get("value")

    def until(self, expression):
        deadline = time.monotonic() + self._timeout_s
        while not (value := self.run(expression)):
            assert time.monotonic() < deadline, f"never became true: {expression}"
            time.sleep(0.1)  # the page tells nobody when
        return value

    def screenshot(self, path, full=False):
        options = {"format": "png", "captureBeyondViewport": full}
        if full:
            size = self._ask("Page.getLayoutMetrics", {})["cssContentSize"]
            options["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": min(6000, size["height"]), "scale": 1}
        with open(path, "wb") as file:
            file.write(base64.b64decode(self._ask("Page.captureScreenshot", options)["data"]))

    def requests(self):
        """URLs that the page asked the network for."""
        return [one["params"]["request"]["url"] for one in self.messages if one["method"] == "Network.requestWillBeSent"]

    def errors(self):
        """What the console reported as errors."""
        return [one["params"] for one in self.messages if one["method"] == "Runtime.exceptionThrown" or (
            one["method"] == "Log.entryAdded" and one["params"]["entry"]["level"] == "error")]

    def close(self):
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        os.close(self._write)
        shutil.rmtree(self._profile, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()


@contextlib.contextmanager
def served(directory):
    """The address at which a directory is served."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(directory)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
