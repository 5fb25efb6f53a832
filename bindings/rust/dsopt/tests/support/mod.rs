// SPDX-License-Identifier: Apache-2.0
#![allow(dead_code)] // each test uses only some functions
use dsopt::{Context, Dtype, Param};
use std::path::PathBuf;
use std::thread;

/// The numbers of the conformance programs: exact in fp32, in [-0.5, 0.5).
pub struct Random(pub u32);

impl Random {
    pub fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (self.0 >> 8) as f32 / 16_777_216.0 - 0.5
    }

    pub fn vec(&mut self, length: usize) -> Vec<f32> {
        (0..length).map(|_| self.next()).collect()
    }
}

pub fn f32_params(sizes: &[usize]) -> Vec<Param> {
    sizes.iter().enumerate().map(|(index, &size)| Param::new(format!("p{index}"), Dtype::F32, size)).collect()
}

/// A path in a new folder, which is removed when dropped.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("dsopt-rust-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Returns the results of one thread per rank.
pub fn ranks<R: Send>(count: usize, run: impl Fn(usize) -> R + Sync) -> Vec<R> {
    thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = (0..count).map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

pub fn context() -> Context {
    Context::builder().threads(1).build().unwrap()
}
