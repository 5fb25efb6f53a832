#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# header.sh INCLUDE-DIR STANDARD COMPILER...: dsopt.h must compile alone in this language version, without warnings and
# without hidden padding in any struct.
set -eu
include=$1 standard=$2
shift 2
case $standard in
c++*) language=c++ ;;
*) language=c ;;
esac
# Included twice: tests the include guard. The function uses the one macro that is meant for callers, and constants as
# switch labels.
"$@" -x "$language" "-std=$standard" -pedantic -Wall -Wextra -Werror -Wpadded "-I$include" -c -o /dev/null - <<'END' ||
#include "dsopt.h"
#include "dsopt.h"
int32_t use(dsopt_status status);
int32_t use(dsopt_status status) {
    DSOPT_NEW(dsopt_step, step);
    switch (status) {
    case DSOPT_OK: return (int32_t)step.count;
    case DSOPT_ERR_ARGUMENT: return DSOPT_VERSION_MINOR;
    default: return dsopt_version();
    }
}
END
    { echo "header: does not compile as $standard"; exit 1; }
