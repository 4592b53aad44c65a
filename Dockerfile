# `duplex serve` in a container, with torch for CPUs:
#   docker build --tag duplex . && docker run --publish 8000:8000 --volume "$PWD/model:/model:ro" duplex
FROM python:3.11-slim AS build
WORKDIR /source
COPY pyproject.toml setup.py constraints.txt README.md LICENSE ./
COPY duplex duplex
RUN python -m venv /opt/duplex && /opt/duplex/bin/python -m pip install --no-cache-dir --constraint constraints.txt \
    --extra-index-url https://download.pytorch.org/whl/cpu '.[serve]'

FROM python:3.11-slim
RUN useradd --create-home duplex
COPY --from=build /opt/duplex /opt/duplex
ENV PATH=/opt/duplex/bin:$PATH
USER duplex
WORKDIR /home/duplex
EXPOSE 8000
HEALTHCHECK --start-period=60s CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["duplex", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD ["/model"]
