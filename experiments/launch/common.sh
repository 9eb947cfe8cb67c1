# shellcheck shell=bash
# What the launchers share; sourced, not run.
#
# Every launcher takes --NAME=VALUE options, --dry-run, then "--" and the arguments of
# experiments.train. The comment at the top of a launcher is its help.

fail() {
  printf 'error: %s\n' "$1" >&2
  exit 2
}

# parse "REQUIRED NAMES" "OTHER NAMES" "$@": sets the variables of these names, which
# hold their defaults, then the array `train` and `dry_run`.
parse() {
  local _required=$1 _known=" $1 $2 " _name
  shift 2
  dry_run=no
  train=()
  while [ $# -gt 0 ]; do
    case $1 in
      --help)
        sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
        exit 0
        ;;
      --dry-run) dry_run=yes ;;
      --)
        shift
        train=("$@")
        break
        ;;
      --*=*)
        _name=${1%%=*}
        _name=${_name#--}
        case $_known in
          *" $_name "*) printf -v "$_name" '%s' "${1#*=}" ;;
          *) fail "--$_name: no such option; there are${_known// / --}dry-run" ;;
        esac
        ;;
      *) fail "$1: write --NAME=VALUE; arguments of experiments.train come after --" ;;
    esac
    shift
  done
  for _name in $_required; do
    [ -n "${!_name}" ] || fail "--$_name=... is missing; see $0 --help"
  done
  for _name in --config --workdir; do
    case " ${train[*]-} " in
      *" $_name="* | *" $_name "*) ;;
      *) fail "$_name=... is missing among the arguments of experiments.train after --" ;;
    esac
  done
}

# counts NAME...: the variables hold numbers of at least 1.
counts() {
  local _name
  for _name in "$@"; do
    case ${!_name} in
      '' | *[!0-9]* | 0*) fail "--$_name=${!_name}: must be a number of at least 1" ;;
    esac
  done
}

# switches NAME...: the variables hold yes or no.
switches() {
  local _name
  for _name in "$@"; do
    case ${!_name} in
      yes | no) ;;
      *) fail "--$_name=${!_name}: must be yes or no" ;;
    esac
  done
}

# Words as a shell would read them back.
quote() {
  local word text='' mark="'\\''"
  for word in "$@"; do
    case $word in
      '' | *[!A-Za-z0-9_@%+=:,./-]*) word="'${word//\'/$mark}'" ;;
    esac
    text+=" $word"
  done
  printf '%s' "${text# }"
}

# $1 as a JSON string, which is a YAML string, whatever is in it.
json() {
  local text=${1//\\/\\\\}
  text=${text//\"/\\\"}
  printf '"%s"' "${text//$'\n'/\\n}"
}

# The command that every launcher runs, by the Python in $1.
train_command() {
  quote "$1" -m experiments.train "${train[@]}"
}

# run COMMAND...: print it, and run it unless this is a dry run.
run() {
  printf '+ %s\n' "$(quote "$@")"
  [ "$dry_run" = yes ] || "$@"
}

# feed TEXT COMMAND...: the same, with TEXT as its input.
feed() {
  local text=$1
  shift
  printf "+ %s <<'EOF'\n%s\nEOF\n" "$(quote "$@")" "$text"
  [ "$dry_run" = yes ] || printf '%s\n' "$text" | "$@"
}
