// SPDX-License-Identifier: Apache-2.0
use crate::{sys, Error, Result};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

thread_local! {
    static HERE: u8 = const { 0 };
}

/// Lets one thread at a time in, and a thread that is in already not at all: a hook could otherwise wait for its own
/// call.
#[derive(Debug, Default)]
pub(crate) struct Lock {
    /// The thread that is in: an address of its own. 0 is nobody.
    owner: AtomicUsize,
    mutex: Mutex<()>,
}

pub(crate) struct Guard<'a> {
    lock: &'a Lock,
    _inside: MutexGuard<'a, ()>,
}

impl Lock {
    pub fn enter(&self, what: &str) -> Result<Guard<'_>> {
        let here = HERE.with(|here| here as *const u8 as usize);
        // Only this thread writes its own address, so no order with other memory is needed.
        if self.owner.load(Ordering::Relaxed) == here {
            return Err(Error::new(
                sys::DSOPT_ERR_BUSY,
                format!("the {what} is in use by the call from which a hook calls"),
            ));
        }
        let inside = self.mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        self.owner.store(here, Ordering::Relaxed);
        Ok(Guard { lock: self, _inside: inside })
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.lock.owner.store(0, Ordering::Relaxed); // and then the mutex lets go
    }
}
