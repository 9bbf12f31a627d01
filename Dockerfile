# `patchword serve` in a container; docs/serve.md shows how to build and run it, deploy/ how to run several.
# By default pip installs torch with CUDA (several GB). --build-arg TORCH=<URL of a CPU wheel> avoids it.
FROM python:3.11-slim
ARG TORCH=torch==2.13.0
WORKDIR /opt/patchword
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir "$TORCH" \
 && pip install --no-cache-dir -c constraints.txt '.[serve,export]' \
 && groupadd --gid 10001 patchword && useradd --no-create-home --uid 10001 --gid 10001 patchword \
 && install -d -o patchword -g patchword /var/cache/patchword
ENV PATCHWORD_CACHE=/var/cache/patchword
VOLUME /var/cache/patchword
# By number: Kubernetes cannot tell whether a name is root's (runAsNonRoot).
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/readyz', timeout=2)"]
ENTRYPOINT ["patchword", "serve"]
CMD ["/model", "--host", "0.0.0.0", "--port", "8000"]
