#!/bin/bash
# Run once by the PostgreSQL image, on an empty volume: a database and its owner for each service.
set -euo pipefail
for name in chat rag; do
    variable="${name^^}_DB_PASSWORD"
    psql --username "$POSTGRES_USER" --set ON_ERROR_STOP=1 --set name="$name" --set password="${!variable}" <<'SQL'
CREATE ROLE :"name" LOGIN PASSWORD :'password';
CREATE DATABASE :"name" OWNER :"name";
REVOKE CONNECT ON DATABASE :"name" FROM PUBLIC;
SQL
done
