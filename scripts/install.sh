#!/bin/sh
# Installs edgepipe for you on Linux, a Mac, or Windows under WSL2, with uv, in an environment of its own.
# Needs no Python and no root. Run it with --help.
set -eu

RELEASED=no # the release makes it "yes": until then the package index has no edgepipe, or another one of that name
PYTHONS='>=3.11,<3.15' # all that edgepipe needs has wheels for these
UV_URL=https://astral.sh/uv/install.sh
HELP='Usage: install.sh [OPTIONS]

Installs edgepipe in an environment of its own, then offers the setup. Run it again to install another version.

  --from WHERE   a wheel, a folder of wheels (all files come from there), a checkout, git+URL, or the URL of an index
                 [default: the checkout that this script is in, else the package index]
  --extra NAME   what computes: torch, mlx, or none (chat and status only)  [default: torch; mlx on a Mac]
  --yes          ask nothing, and do not start the setup
  --dry-run      print the commands, change nothing
  --uninstall    remove edgepipe: its service, identity, settings, logs and program; models stay
  --help         print this text'

say() { printf '%s\n' "$*"; }

# die WHAT FACT NEXT_STEP
die() {
  printf 'error: %s\n' "$1" >&2
  [ -z "$2" ] || printf '       %s\n' "$2" >&2
  printf '   try: %s\n' "$3" >&2
  exit 2
}

# act COMMAND...: prints the command if --dry-run was given, else runs it.
act() {
  if [ "$dry_run" = no ]; then
    "$@"
    return
  fi
  line=
  for word in "$@"; do
    case $word in
      *[!A-Za-z0-9_./:=+@-]*) line="$line '$word'" ;;
      *) line="$line $word" ;;
    esac
  done
  say " $line"
}

# ask QUESTION: whether a person at the terminal agrees. Nobody is asked with --yes or --dry-run, and without a terminal.
ask() {
  if [ "$yes$dry_run" != nono ] || ! (: </dev/tty) 2>/dev/null; then return 1; fi
  printf '%s [Y/n] ' "$1"
  read -r answer </dev/tty || return 1
  case $answer in '' | [Yy]*) return 0 ;; *) return 1 ;; esac
}

absolute() { (cd "$(dirname "$1")" && printf '%s/%s\n' "$(pwd -P)" "$(basename "$1")"); }

has_nvidia_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; }

is_wsl() { grep -qi microsoft "${EP_KERNEL_NAME_FILE:-/proc/sys/kernel/osrelease}" 2>/dev/null; }

find_uv() { # sets uv to its path, or to the place where it will be
  uv_bin=${UV_INSTALL_DIR:-${XDG_BIN_HOME:-$HOME/.local/bin}}
  for uv in "$(command -v uv || true)" "$uv_bin/uv" "$HOME/.local/bin/uv" "$HOME/.cargo/bin/uv"; do
    if [ -n "$uv" ] && [ -x "$uv" ]; then return 0; fi
  done
  uv=$uv_bin/uv
  return 1
}

fetch_uv() {
  if [ "$dry_run" = yes ]; then
    say "  curl -LsSf $UV_URL | sh"
    return
  fi
  script=$(mktemp)
  if command -v curl >/dev/null 2>&1; then
    curl -LsSf "$UV_URL" -o "$script" || rm -f "$script"
  elif command -v wget >/dev/null 2>&1; then
    wget -q "$UV_URL" -O "$script" || rm -f "$script"
  else
    rm -f "$script"
    die "uv cannot be fetched" "this machine has neither curl nor wget" "install curl, or uv itself: pipx install uv"
  fi
  [ -s "$script" ] || die "uv cannot be fetched" "$UV_URL does not answer" "install uv by hand: pipx install uv"
  UV_NO_MODIFY_PATH=1 UV_INSTALL_DIR=$uv_bin sh "$script" >/dev/null || die "uv was not installed" \
    "its installer failed, see above" "install uv by hand: pipx install uv"
  rm -f "$script"
}

# Sets the words that tell uv what to install: package, source, and from_text for people.
choose_source() {
  brackets=
  [ "$extra" = none ] || brackets="[$extra]"
  package="edgepipe$brackets"
  source=
  here=$(dirname "$0")/..
  if [ -z "$from" ] && [ -f "$0" ] && [ -f "$here/edgepipe/__init__.py" ]; then from=$here; fi
  case $from in
    '')
      [ "$RELEASED" = yes ] || die "edgepipe has no release yet" "" "install.sh --from CHECKOUT    (or a wheel)"
      from_text="the package index"
      ;;
    git+*) package="edgepipe$brackets @ $from" from_text=$from ;;
    http://* | https://*) source="--index=$from" from_text="the index $from" ;;
    *.whl)
      [ -f "$from" ] || die "there is no file $from" "" "name a wheel: --from edgepipe-VERSION-py3-none-any.whl"
      from=$(absolute "$from")
      package="$from$brackets" from_text=$from
      ;;
    *)
      [ -d "$from" ] || die "there is no folder $from" "" "name a wheel, a folder, a checkout, or a URL"
      from=$(cd "$from" && pwd -P)
      if [ -f "$from/edgepipe/__init__.py" ]; then
        package="$from$brackets" from_text="the checkout $from"
      elif [ -n "$(find "$from" -maxdepth 1 -name 'edgepipe-*.whl' | head -n 1)" ]; then
        source="--find-links=$from" from_text="the wheels in $from"
      else
        die "$from holds no edgepipe" "it is neither a checkout nor a folder with edgepipe-*.whl" "name one of them"
      fi
      ;;
  esac
}

# Ends where MLX has no packages: on Macs without Apple silicon, and before macOS 14.
check_mlx() {
  [ "$system" = Darwin ] || return 0
  version=$(sw_vers -productVersion 2>/dev/null || true)
  if [ "$(uname -m)" != arm64 ]; then
    die "MLX needs a Mac with Apple silicon" "this Mac has $(uname -m)" "install.sh --extra torch"
  fi
  case $version in
    1[1-3] | 1[1-3].*) die "MLX needs macOS 14 or later" "this Mac has macOS $version" "install.sh --extra torch, or update macOS" ;;
  esac
}

# Says what will be fetched, before anything is.
say_sizes() {
  say "edgepipe comes from $from_text. Sizes of what is fetched, if it is not on this machine:"
  find_uv || say "  uv, which installs Python programs          about 25 MB"
  say "  Python 3.11 or newer                        about 30 MB"
  say "  edgepipe and what it needs                  about 100 MB"
  case $extra in
    mlx) say "  MLX                                         about 100 MB" ;;
    torch)
      if [ "$system" = Darwin ]; then
        say "  PyTorch                                     about 100 MB"
      elif has_nvidia_gpu; then
        say "  PyTorch with CUDA, for the NVIDIA GPU       about 3 GB"
      else
        say "  PyTorch for the CPU                         about 200 MB"
      fi
      ;;
  esac
}

install() {
  [ "$extra" != mlx ] || check_mlx
  choose_source
  say_sizes
  [ "$dry_run" = no ] || say "would run:"
  find_uv || fetch_uv
  set -- tool install --python "$PYTHONS" --reinstall-package edgepipe
  case $source in
    '') ;;
    --find-links=*) set -- "$@" --no-index "$source" ;;
    *) set -- "$@" "$source" ;;
  esac
  case $extra$source in
    *--find-links=*) ;; # the folder decides which PyTorch
    torch*) set -- "$@" --torch-backend=auto ;;
  esac
  act "$uv" "$@" "$package" || die "edgepipe was not installed" "uv failed, see above" \
    "run this script again, or with --from WHERE"
  if is_wsl; then
    say "This is Windows under WSL2. Other machines reach it in mirrored networking only:"
    say "put the line networkingMode=mirrored below [wsl2] in %UserProfile%\\.wslconfig, then: wsl --shutdown"
  fi
  if [ "$dry_run" = yes ]; then
    say "then: edgepipe setup"
    return
  fi
  bin=$("$uv" tool dir --bin)
  say
  "$bin/edgepipe" version
  case :$PATH: in
    *:"$bin":*) command=edgepipe ;;
    *)
      command=$bin/edgepipe
      say "$bin is not in PATH. Add it for new terminals: $uv tool update-shell"
      ;;
  esac
  if ask "Make this machine a node of your cluster now?"; then
    "$bin/edgepipe" setup </dev/tty
  else
    say "next: $command setup"
  fi
}

uninstall() {
  find_uv || die "uv is not on this machine, so this script did not install edgepipe" "" \
    "remove it as you installed it, such as: pip uninstall edgepipe"
  program=$("$uv" tool dir --bin)/edgepipe
  [ "$dry_run" = no ] || say "would run:"
  if [ -x "$program" ]; then
    set -- uninstall
    [ "$yes" = no ] || set -- "$@" --yes
    if [ "$yes$dry_run" = nono ] && (: </dev/tty) 2>/dev/null; then
      "$program" "$@" </dev/tty || exit $?
    else
      act "$program" "$@" || exit $?
    fi
  fi
  act "$uv" tool uninstall edgepipe || exit $?
  say "uv and what it keeps in its cache stay: other programs may use them. To empty the cache: $uv cache clean"
}

from='' extra='' yes=no dry_run=no job=install
system=$(uname -s)
while [ $# -gt 0 ]; do
  case $1 in
    --from | --extra)
      [ $# -ge 2 ] || die "$1 needs a value" "" "install.sh --help"
      if [ "$1" = --from ]; then from=$2; else extra=$2; fi
      shift
      ;;
    --from=*) from=${1#*=} ;;
    --extra=*) extra=${1#*=} ;;
    --yes | -y) yes=yes ;;
    --dry-run) dry_run=yes ;;
    --uninstall) job=uninstall ;;
    --help | -h)
      say "$HELP"
      exit 0
      ;;
    *) die "install.sh has no option $1" "" "install.sh --help" ;;
  esac
  shift
done
case $system in
  Linux) : "${extra:=torch}" ;;
  Darwin) : "${extra:=mlx}" ;;
  *) die "edgepipe does not run on $system" "it runs on Linux, macOS, and Windows under WSL2" "in PowerShell: wsl --install" ;;
esac
case $extra in
  torch | mlx | none) ;;
  *) die "--extra is torch, mlx or none" "it was '$extra'" "install.sh --help" ;;
esac
"$job"
