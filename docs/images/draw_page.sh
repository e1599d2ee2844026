#!/bin/sh
# Draws the page of a run, from its logdir: docs/images/draw_page.sh LOGDIR (needs chromium).
set -eu
here=$(dirname "$0")
page=$(mktemp -d)/run.html
zmqtrain report "$1" --html "$page"
chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1240,1130 \
  --screenshot="$here/page.png" "file://$page"
