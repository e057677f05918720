# Prefect's and MLflow's servers in the versions of constraints/cpu.txt, with their PostgreSQL drivers.
FROM python:3.12.14-slim-bookworm@sha256:782412e85d0f0984994c290652577d4018aff08145c85b262bb63dc0c7522254

COPY constraints/cpu.txt /tmp/constraints.txt
RUN pip install --no-cache-dir --disable-pip-version-check -c /tmp/constraints.txt prefect mlflow psycopg2-binary asyncpg \
    && rm /tmp/constraints.txt \
    && install --directory --owner 65532 --group 65532 /artifacts
COPY deploy/images/answers.py /usr/local/bin/answers.py

USER 65532:65532
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
