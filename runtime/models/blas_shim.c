/* Lets MLX's CPU backend compute with the OpenBLAS inside numpy's wheel.
 *
 * numpy bundles OpenBLAS under prefixed names with 64-bit integers (scipy_cblas_sgemm64_); MLX calls
 * the plain ones with 32-bit integers. This library exports the three products MLX uses (see
 * `nm -D --undefined-only libmlx.so`) and forwards them. LAPACK stays MLX's own: decompositions are
 * not in a language model's path.
 *
 * bind() returns 0, 1 (library does not load) or 2 (a symbol is missing).
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>

typedef void (*sgemm_fn)(int, int, int, int64_t, int64_t, int64_t, float, const float *, int64_t,
                         const float *, int64_t, float, float *, int64_t);
typedef void (*dgemm_fn)(int, int, int, int64_t, int64_t, int64_t, double, const double *, int64_t,
                         const double *, int64_t, double, double *, int64_t);
typedef void (*cgemm_fn)(int, int, int, int64_t, int64_t, int64_t, const void *, const void *, int64_t,
                         const void *, int64_t, const void *, void *, int64_t);

static sgemm_fn sgemm;
static dgemm_fn dgemm;
static cgemm_fn cgemm;

static void *find(void *library, const char *prefix, const char *name, const char *suffix)
{
    char symbol[128];
    snprintf(symbol, sizeof symbol, "%s%s%s", prefix, name, suffix);
    return dlsym(library, symbol);
}

int offbook_blas_bind(const char *path, const char *prefix, const char *suffix)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return 1;
    sgemm = (sgemm_fn)find(library, prefix, "cblas_sgemm", suffix);
    dgemm = (dgemm_fn)find(library, prefix, "cblas_dgemm", suffix);
    cgemm = (cgemm_fn)find(library, prefix, "cblas_cgemm", suffix);
    return sgemm && dgemm && cgemm ? 0 : 2;
}

void cblas_sgemm(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a, int lda,
                 const float *b, int ldb, float beta, float *c, int ldc)
{
    sgemm(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void cblas_dgemm(int order, int ta, int tb, int m, int n, int k, double alpha, const double *a, int lda,
                 const double *b, int ldb, double beta, double *c, int ldc)
{
    dgemm(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void cblas_cgemm(int order, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int lda,
                 const void *b, int ldb, const void *beta, void *c, int ldc)
{
    cgemm(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
