-- Run once, when the volume is new. Prefect's database is the image's own POSTGRES_DB.
CREATE DATABASE mlflow;
