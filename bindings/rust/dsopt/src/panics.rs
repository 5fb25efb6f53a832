// SPDX-License-Identifier: Apache-2.0
//! Panics must not unwind through C: hooks keep theirs here, and the call that ran the hook goes on with it.
use std::any::Any;
use std::cell::Cell;
use std::mem;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};

thread_local! {
    static PENDING: Cell<Option<Box<dyn Any + Send>>> = Cell::new(None);
}

/// Run a hook. The first panic of a call is kept, and `fallback` is the hook's result.
pub(crate) fn catch<R>(fallback: R, hook: impl FnOnce() -> R) -> R {
    // The hook's captures are `&` to types whose panics the caller sees again: nothing broken stays unnoticed.
    match catch_unwind(AssertUnwindSafe(hook)) {
        Ok(result) => result,
        Err(panic) => {
            let mut panic = Some(panic);
            // No place where the thread is ending already.
            let _ = PENDING.try_with(|pending| match pending.take() {
                Some(first) => pending.set(Some(first)),
                None => pending.set(panic.take()),
            });
            mem::forget(panic); // its drop could panic as well
            fallback
        }
    }
}

/// After a call: go on with the panic of a hook, if there was one.
pub(crate) fn resume() {
    if let Ok(Some(panic)) = PENDING.try_with(Cell::take) {
        resume_unwind(panic);
    }
}

/// A call from a destructor, which must not panic: what its hooks panic with ends here, and its message has been
/// printed when it began. A panic that is pending already stays: the destructor may run in a hook of another call.
pub(crate) fn discard(call: impl FnOnce()) {
    let before = PENDING.try_with(Cell::take).unwrap_or(None);
    call();
    let _ = PENDING.try_with(|pending| mem::forget(pending.replace(before)));
}
