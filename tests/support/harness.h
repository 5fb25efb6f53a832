// SPDX-License-Identifier: Apache-2.0
// Common headers of all unit tests. Precompiled, so that a test program parses them once.
#pragma once
#include "array.h"
#include "expect.h"
#include "file.h"
#include "handles.h"
#include "label.h"
#include "numbers.h"
#include "trainer.h"
#include "workers.h"
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <gtest/gtest.h>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>
