// Browsers start no Worker from the file system. There, a hidden frame of the same page runs the script instead, so
// that the site's search works without a server.
if (location.protocol === "file:") {
  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.ready = new Promise((resolve) => {
        const start = () => {
          const inside = frame.contentWindow;
          inside.importScripts = (...urls) => urls.reduce((before, next) => before.then(() => run(inside, next)), Promise.resolve());
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          run(inside, url).then(() => resolve(inside));
        };
        document.body ? append() : addEventListener("DOMContentLoaded", append);
        function append() {
          document.body.append(frame);
          start();
        }
      });
      this.addEventListener("message", (event) => this.onmessage && this.onmessage(event));
    }

    postMessage(data) {
      this.ready.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }

    terminate() {}
  }

  function run(inside, url) {
    return new Promise((resolve, reject) => {
      const script = inside.document.createElement("script");
      script.src = new URL(url, location.href).href;
      script.onload = resolve;
      script.onerror = reject;
      inside.document.body.append(script);
    });
  }

  window.IFrameWorker = window.Worker = IFrameWorker;
}
