/* Reading a block's file where its tensors belong, and their checksums: one call for a whole file, which keeps
 * no other thread of the interpreter waiting. Included by native.c. */

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>

enum { READ_AT_ONCE = 512, READ_BYTES = 128 << 10 }; /* what was read is hashed while it is in the core's own cache */

/* Fill `count` buffers from where the file stands. Returns bytes read, fewer if the file ends; -errno. */
static int64_t read_run(int fd, struct iovec *to, int64_t count) {
    int64_t got = 0;
    while (count) {
        ssize_t n = readv(fd, to, (int)least(count, READ_AT_ONCE));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return -errno;
        if (n == 0) break;
        got += n;
        for (; count && n >= (ssize_t)to->iov_len; to++, count--) n -= (ssize_t)to->iov_len;
        if (n) to->iov_base = (char *)to->iov_base + n, to->iov_len -= (size_t)n;
    }
    return got;
}

static int64_t read_file(int fd, int64_t count, void *const *to, const int64_t *sizes, uint8_t *sums) {
    int64_t got = 0, at = 0;
    for (int64_t i = 0; i < count;) {
        struct iovec run[READ_AT_ONCE];
        int64_t n = 0, wanted = 0, start = at;
        for (; i < count && !to[i]; i++) at += sizes[i], start = at;
        const int64_t first = i;
        for (; i < count && to[i] && n < READ_AT_ONCE && wanted < READ_BYTES; i++, n++) {
            run[n] = (struct iovec){to[i], (size_t)sizes[i]};
            at += sizes[i], wanted += sizes[i];
        }
        if (!n) break;
        if (lseek(fd, start, SEEK_SET) < 0) return -errno;
        int64_t some = read_run(fd, run, n);
        if (some < 0) return some;
        got += some;
        if (some < wanted) break;
        for (int64_t p = first; p < i; p++)
            if (sizes[p] >= HASH_LEAST) isa->hash(to[p], sizes[p], sums + 16 * p);
    }
    return got;
}

/* Read a file of `size` bytes, which has `count` pieces: to[i] is where piece i belongs, NULL where it is not
 * wanted. sums[16 * i]: the xxh3-128 of what was read, of more than 240 bytes.
 *
 * Returns bytes read, fewer than wanted if the file ends early; -errno. `found`: its size, and if that is another,
 * nothing is read. */
API int64_t offbook_read(const char *path, int64_t size, int64_t count, void *const *to, const int64_t *sizes,
                         uint8_t *sums, int64_t *found) {
    struct stat facts;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -errno;
    int64_t got = fstat(fd, &facts) ? -errno : 0;
    if (!got && (*found = facts.st_size) == size) got = read_file(fd, count, to, sizes, sums);
    close(fd);
    return got;
}

/* Ask the system to keep zeros at `at` in large pages: it takes them back and gives others when they are touched. */
API void offbook_large_pages(char *at, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = ((uintptr_t)at + page - 1) / page * page;
    const uintptr_t last = ((uintptr_t)at + (uintptr_t)bytes) / page * page;
    if (first < last && !madvise((void *)first, last - first, MADV_HUGEPAGE)) madvise((void *)first, last - first, MADV_DONTNEED);
#else
    (void)at, (void)bytes;
#endif
}

struct copy { /* `rows` rows of `bytes` bytes, at these strides */
    const char *from;
    char *to;
    int64_t rows, bytes, from_row, to_row;
};

API void offbook_copy(int64_t count, const struct copy *c) {
    for (; count > 0; count--, c++)
        for (int64_t r = 0; r < c->rows; r++) memcpy(c->to + r * c->to_row, c->from + r * c->from_row, (size_t)c->bytes);
}
