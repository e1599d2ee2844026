# @name@ on @login@
set -u
umask 077
own="$HOME/.local/state/zmqtrain-hosts/"@name@/@login@
python=@python@
working=@working@
runs() { [ -e "$own/$1.lock" ] && ! flock --nonblock --shared "$own/$1.lock" true; }
tasks() { cd "$own" 2>/dev/null && ls | sed -n 's/[.]lock$//p'; }
absent() { echo "it does not run there" >&2; exit 1; }
state() {
  for task in $(tasks); do
    if runs "$task"; then echo "$task running"; else
      echo "$task $(cat "$own/$task.code" 2>/dev/null || echo lost)"
    fi
  done
}
leave() { # tasks, in order; they are killed if that takes too long
  for task in "$@"; do runs "$task" && kill -s TERM -- "-$(cat "$own/$task.pid")"; done
  tries=@tries@
  for task in "$@"; do
    while runs "$task"; do
      tries=$((tries - 1))
      [ "$tries" -gt 0 ] || kill -s KILL -- "-$(cat "$own/$task.pid")"
      sleep 0.2
    done
    rm -f "$own/$task.lock" "$own/$task.pid" "$own/$task.code"
  done
}
launch() { # a task, and its command; nothing if it runs
  (
    own="$own/$1"
    shift
    exec 9>>"$own.lock"
    flock --timeout 1 9 || exit 0
    rm -f "$own.code"
    setsid sh -c 'trap : TERM; own=$1; shift; "$@"; echo $? >"$own.code"' sh "$own" "$@" \
      </dev/null >>"$own.log" 2>&1 &
    echo $! >"$own.pid"
  )
}
check() { # the job's file
  [ ! -e "$own" ] || echo "taken $own"
  command -v flock >/dev/null && command -v setsid >/dev/null || echo tools
  echo "cpus $(getconf _NPROCESSORS_ONLN)"
  cd "$working" 2>/dev/null || echo "directory $working"
  [ ! -f "$1" ] || sha256sum <"$1" | sed 's/^/job /; s/ *-$//'
  "$python" -c 'import zmqtrain.roles.task; from zmqtrain.wire import messages
print("protocol", messages.PROTOCOL_VERSION)' 2>&1 ||
    true # its output is a fact, too
}
start() { # the number of workers
  mkdir -p "$own/keys" && cd "$working" && secrets && registry || exit
  for index in @workers@; do
    [ "$index" -lt "$1" ] || leave "worker-$index"
  done
@launches@}
case "$1" in
  check) check @job@ ;;
  start) start "$2" ;;
  keys) [ ! -d "$own" ] || "$2" ;;
  state) state ;;
  ended) cat "$own/ended.json" 2>/dev/null || true ;;
  meet) runs "$2" || absent; echo met; cat >/dev/null ;;
  log) [ -e "$own/$2.log" ] || absent; exec tail -n +1 ${3:-} "$own/$2.log" ;;
  end) leave $(tasks); rm -rf "$own" && { rmdir "${own%/*}" 2>/dev/null || true; } ;;
esac
