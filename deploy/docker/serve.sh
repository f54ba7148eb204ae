#!/bin/sh
# Starts the engine with its keys in a file: arguments can be read by every user of the host.
# Arguments: SGLang's. Environment: ENGINE_API_KEY, ENGINE_ADMIN_API_KEY, and the plugin's GRKV_... settings.
set -eu
: "${ENGINE_API_KEY:?set ENGINE_API_KEY}" "${ENGINE_ADMIN_API_KEY:?set ENGINE_ADMIN_API_KEY}"
umask 077
keys=$(mktemp --suffix=.yaml)
printf 'api-key: "%s"\nadmin-api-key: "%s"\n' "$ENGINE_API_KEY" "$ENGINE_ADMIN_API_KEY" > "$keys"
unset ENGINE_API_KEY ENGINE_ADMIN_API_KEY
exec grkv serve -- --config "$keys" "$@"
