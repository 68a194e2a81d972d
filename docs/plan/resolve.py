import os,re,collections,sys
sys.path.insert(0,os.path.dirname(os.path.abspath(__file__)))
from decl import toks
CAMEL=re.compile(r'^[A-Z]\w*[a-z]\w*$|^[A-Z]$|^Self$')
class Tree:
    def __init__(s,root):
        s.root=root;s.T={};s.text={}
        for base in ('crates','xtask','examples','fuzz','bench'):
            for d,ds,fs in os.walk(os.path.join(root,base)):
                if 'target' in d.split(os.sep): continue
                for f in fs:
                    if f.endswith('.rs'): s.load(os.path.relpath(os.path.join(d,f),root))
        s.index()
    def load(s,rel,text=None):
        t=text if text is not None else open(os.path.join(s.root,rel),encoding='utf8').read()
        s.text[rel]=t;s.T[rel]=toks(t)
    def index(s):
        s.crate={};s.mods={};s.modpath={};s.lib={}
        for rel in s.T:
            a=rel.split('/')
            if a[0]=='crates' and a[2]=='src' or a[0]in('bench',) and len(a)>2 and a[2]=='src':
                base='/'.join(a[:3]);rest=a[3:]
                if rest[0]=='bin': root=rel;m=()
                else: root=base;m=rest
            elif a[0] in('xtask','fuzz') and a[1]=='src': root='/'.join(a[:2]);m=a[2:]
            elif a[0]=='fuzz': root=rel;m=()
            elif a[0]=='crates' and a[2]=='tests':
                root='/'.join(a[:4]) if len(a)>4 else rel;m=a[4:] if len(a)>4 else ()
            elif a[0]=='crates' and a[2]=='examples':
                if len(a)>4: root='/'.join(a[:4]);m=a[4:]
                else: root=rel;m=()
            elif a[0]=='crates' and a[2]=='benches': root=rel;m=()
            else: root=rel;m=()
            m=list(m)
            if m:
                m[-1]=m[-1][:-3]
                if m[-1]=='mod': m.pop()
                elif len(m)==1 and m[0] in('lib','main'): m=[]
            m=tuple(m)
            # a crate with lib and main: main is a root of its own
            if rel.endswith('/src/main.rs') and rel.replace('main.rs','lib.rs') in s.T: root=rel
            s.crate[rel]=root;s.modpath[rel]=m;s.mods[(root,m)]=rel
        for rel in s.T:
            if rel.startswith('crates/') and rel.endswith('/src/lib.rs') and len(rel.split('/'))==4:
                s.lib[rel.split('/')[1].replace('-','_')]=rel
        if 'fuzz/src/lib.rs' in s.T: s.lib['hapax_fuzz']='fuzz/src/lib.rs'
        s.decl=collections.defaultdict(set);s.uses={};s.imp={}
        for rel in s.T: s.index_file(rel)
    def index_file(s,rel):
            t=s.T[rel];s.decl[rel]=set()
            c=[x for x in t if x[0] not in('com','blk')]
            for i,x in enumerate(c):
                if x[0]=='id' and x[1] in('struct','enum','trait','type','union') and i+1<len(c) and c[i+1][0]=='id':
                    # associated types inside impl/trait: `type X` preceded by { or ; or } -- keep only if indentation 0 or inside mod
                    if x[1]=='type':
                        ls=s.text[rel].rfind('\n',0,x[3])+1
                        ind=len(s.text[rel][ls:x[3]])-len(s.text[rel][ls:x[3]].lstrip())
                        if ind>0: continue
                    s.decl[rel].add(c[i+1][1])
                if x[1]=='random_id' and i+2<len(c):
                    pass
            if rel.endswith('hapax/src/record.rs'):
                for m in re.finditer(r'random_id! \{(?:\s*///.*\n)*\s*(\w+)',s.text[rel]): s.decl[rel].add(m.group(1))
            if rel.endswith('testkit/src/sim/tally.rs'): s.decl[rel]|={'Fault','Event'}
            s.uses[rel]=s.parse_uses(c)
            u=s.uses[rel]
            d={};g=[]
            for path,alias,pos in u:
                if path and path[-1]=='*': g.append(path[:-1])
                elif path and path[-1]=='self': d[alias or path[-2]]=path[:-1]
                elif path: d[alias or path[-1]]=path
            s.imp[rel]=(d,g)
    def parse_uses(s,c):
        out=[];i=0;n=len(c)
        while i<n:
            if c[i][0]=='id' and c[i][1]=='use' and (i==0 or c[i-1][1] in(';','}',')','pub',']','{') or c[i-1][0] in('com',)):
                if i+1<n and c[i+1][1]=='<': i+=1;continue
                def tree(i,pre):
                    cur=list(pre);pos=None;alias=None
                    while i<n:
                        k,y,l,p=c[i]
                        if y=='{':
                            i+=1
                            while c[i][1]!='}':
                                i=tree(i,cur)
                                if c[i][1]==',': i+=1
                            i+=1
                            return i
                        elif y in(',','}',';'):
                            out.append((cur,alias,pos));return i
                        elif y=='as': alias=c[i+1][1];i+=2
                        elif y=='::': i+=1
                        else: cur=cur+[y];pos=p;i+=1
                    return i
                i=tree(i+1,[])
            i+=1
        return out
    def module(s,rel,segs,seen=()):
        """file of the module that `segs` names, seen from rel; None if not ours"""
        if not segs: return rel
        root,m=s.crate[rel],s.modpath[rel]
        h=segs[0]
        if h=='crate': cur=(root,());rest=segs[1:]
        elif h=='self': cur=(root,m);rest=segs[1:]
        elif h=='super':
            k=0
            while k<len(segs) and segs[k]=='super': k+=1
            if len(m)<k: return rel if k==1 else None
            cur=(root,m[:len(m)-k]);rest=segs[k:]
        elif h in s.lib and (root,m+(h,)) not in s.mods: 
            f=s.lib[h];cur=(s.crate[f],());rest=segs[1:]
        elif (root,m+(h,)) in s.mods: cur=(root,m+(h,));rest=segs[1:]
        else:
            d,g=s.imp[rel]
            if h in d and (rel,h) not in seen:
                return s.module(rel,d[h]+list(segs[1:]),seen+((rel,h),)) if d[h]!=list(segs) else None
            return None
        for k,x in enumerate(rest):
            nxt=(cur[0],cur[1]+(x,))
            if nxt in s.mods: cur=nxt;continue
            f=s.mods.get(cur)
            if f and x in s.imp[f][0] and (f,x) not in seen:
                f2=s.module(f,s.imp[f][0][x],seen+((f,x),))
                if f2: cur=(s.crate[f2],s.modpath[f2]);continue
            return None
        return s.mods.get(cur)
    def name(s,rel,name,seen=frozenset()):
        if rel is None or (rel,name) in seen: return None
        seen=seen|{(rel,name)}
        if name in s.decl[rel]: return (rel,name)
        d,g=s.imp[rel]
        if name in d:
            p=d[name]
            if len(p)==1: return None
            f=s.module(rel,p[:-1])
            if f: return s.name(f,p[-1],seen)
            return None
        for p in g:
            f=s.module(rel,p)
            if f and f!=rel:
                r=s.name(f,name,seen)
                if r: return r
            # `use super::*` of an inline module: same file
        return None
    def path(s,rel,segs):
        # `super::Name` of an inline module (`mod tests`): the file itself
        if len(segs)==2 and segs[0]=='super' and segs[1] in s.decl[rel]: return (rel,segs[1])
        if len(segs)==1: return s.name(rel,segs[0])
        f=s.module(rel,segs[:-1])
        return s.name(f,segs[-1]) if f else None
    def sites(s,target):
        """target=(file,name): {rel: [(start,end)]} code positions and doc positions"""
        tf,tn=target;out={}
        aliases={tn}
        for rel,t in s.T.items():
            if not any(x[0]=='id' and x[1]==tn for x in t) and tn not in s.text[rel]: continue
            c=[x for x in t if x[0] not in('com','blk')];hits=[]
            usepos={pos:p for p,a,pos in s.uses[rel] if p and p[-1]==tn}
            for i,(k,x,l,p) in enumerate(c):
                if k!='id' or x!=tn: continue
                if p in usepos:
                    if s.path(rel,usepos[p])==target: hits.append((p,p+len(tn)))
                    continue
                if i and c[i-1][1] in('fn','mod','.'): continue
                if i and c[i-1][1]=='::':
                    segs=[tn];j=i-1
                    while j>0 and c[j][1]=='::' and c[j-1][0]=='id': segs.insert(0,c[j-1][1]);j-=2
                    if j>=0 and c[j][1]=='::': continue   # <X>::Name or ::<..>::
                    if len(segs)>1 and CAMEL.match(segs[-2]): continue
                    if s.path(rel,segs)==target: hits.append((p,p+len(tn)))
                else:
                    if s.name(rel,tn)==target: hits.append((p,p+len(tn)))
            # minus enum variant declarations
            v=variants(c)
            hits=[h for h in hits if h[0] not in v]
            docs=s.docs(rel,t,target,bool(hits))
            if hits or docs: out[rel]=(hits,docs)
        return out
    def docs(s,rel,t,target,here):
        tf,tn=target;out=[]
        fence=None;last=None;buf=[]
        def span(text,base):
            for m in re.finditer(r'(?<![\w.])((?:[A-Za-z_]\w*::)*)'+re.escape(tn)+r'(?!\w)',text):
                segs=[x for x in m.group(1).split('::') if x]+[tn]
                if len(segs)>1 and CAMEL.match(segs[-2]): continue
                r=s.path(rel,segs)
                if r==target or (r is None and len(segs)==1 and s.crate[rel]==s.crate[tf] and tn in getattr(s,'orig_unique',()) and tn not in s.imp[rel][0]):
                    out.append((base+m.end()-len(tn),base+m.end()))
        for k,x,l,p in t:
            if k!='com': continue
            if last is not None and l!=last+1: 
                if fence is not None: out.extend(fence_hits(s,fence,target)) if fence!='text' else None
                fence=None
            last=l
            m=re.match(r'\s*(?:///|//!) ?',x)
            body=x[m.end():] if m else None
            if body is not None and body.lstrip().startswith('```'):
                if fence is None:
                    lang=body.lstrip()[3:]
                    fence='text' if lang.startswith(('text','json','toml','sh','console','sql')) else []
                else:
                    if fence!='text': out.extend(fence_hits(s,fence,target))
                    fence=None
                continue
            if fence is not None:
                if fence!='text' and body is not None: fence.append((body,p+m.end()))
                continue
            for m2 in re.finditer(r'`([^`\n]+)`',x): span(m2.group(1),p+m2.start(1))
            for m2 in re.finditer(r'^\s*(?:///|//!)?\s*\[[^\]]+\]:\s*(\S+)',x): span(m2.group(1),p+m2.start(1))
            for m2 in re.finditer(r'\]\(([^)\s]+)\)',x): span(m2.group(1),p+m2.start(1))
        return sorted(set(out))
    def unique(s,tf,tn):
        return sum(1 for r in s.T if s.crate[r]==s.crate[tf] and tn in s.decl[r])==1
def variants(c):
    out=set();i=0;n=len(c)
    while i<n:
        if c[i][1]=='enum' and i+1<n and c[i+1][0]=='id':
            j=i+2;a=0
            while j<n and not(a==0 and c[j][1]=='{'):
                if c[j][1]=='<':a+=1
                elif c[j][1]=='>':a-=1
                j+=1
            d=1;j+=1
            while j<n and d:
                y=c[j][1]
                if y in('{','(','['):d+=1
                elif y in('}',')',']'):d-=1
                elif d==1 and c[j][0]=='id' and c[j-1][1] in('{',',',']'): out.add(c[j][3])
                j+=1
            i=j;continue
        i+=1
    return out
def fence_hits(s,lines,target):
    """hits in a doctest: the name as imported there"""
    tf,tn=target
    text='';pos=[]
    for b,p in lines:
        bb=b;off=0
        if bb.startswith('# '): off=2;bb=bb[2:]
        elif bb=='#': bb=''
        for k in range(len(bb)): pos.append(p+off+k)
        pos.append(None);text+=bb+'\n'
    if tn not in text: return []
    t=toks(text);c=[x for x in t if x[0] not in('com','blk')]
    u=s.parse_uses(c);d={};g=[];usepos={}
    lib={}
    anyfile=tf
    def ext(segs):
        if not segs or segs[0] not in s.lib: return None
        f=s.lib[segs[0]]
        m=s.module(f,['crate']+segs[1:-1])
        return s.name(m,segs[-1]) if m else None
    for path,alias,p in u:
        if path and path[-1]=='*': g.append(path[:-1])
        elif path: d[alias or path[-1]]=path;usepos[p]=path
    own={c[i+1][1] for i,x in enumerate(c[:-1]) if x[1] in('struct','enum','trait','type')}
    out=[];v=variants(c)
    for i,(k,x,l,p) in enumerate(c):
        if k!='id' or x!=tn or p in v: continue
        ok=False
        if p in usepos: ok=ext(usepos[p])==target
        elif i and c[i-1][1]=='::':
            segs=[tn];j=i-1
            while j>0 and c[j][1]=='::' and c[j-1][0]=='id': segs.insert(0,c[j-1][1]);j-=2
            if len(segs)>1 and CAMEL.match(segs[-2]): continue
            if segs[0] in d: segs=d[segs[0]]+segs[1:]
            ok=ext(segs)==target
        elif tn in own: ok=False
        elif tn in d: ok=ext(d[tn])==target
        else: ok=any(ext(q+[tn])==target for q in g)
        if ok: out.append((pos[p],pos[p]+len(tn)))
    return out
def md_sites(s,text,target):
    """README and manual pages: fences by imports; spans where the name is unique among public names or written with its path"""
    tf,tn=target;out=[];pos=0;fence=None
    if tn not in text: return []
    for line in text.split('\n'):
        if line.lstrip().startswith('```'):
            if fence is None:
                lang=line.strip()[3:]
                fence=[] if lang=='' or lang.startswith(('rust','no_run','ignore','should','compile')) else 'text'
            else:
                if fence!='text': out.extend(fence_hits(s,fence,target))
                fence=None
        elif fence is not None:
            if fence!='text': fence.append((line,pos))
        else:
            def res(segs):
                if segs and segs[0] in s.lib:
                    f=s.module(s.lib[segs[0]],['crate']+segs[1:-1]);return s.name(f,segs[-1]) if f else None
                if segs and segs[0]=='crate':
                    f=s.module(tf,segs[:-1]);return s.name(f,segs[-1]) if f else None
                return None
            done=set()
            for m2 in re.finditer(r'\[`([^`\n]+)`\]\(([^)\s#]+)[^)]*\)',line):
                segs=m2.group(2).split('::')
                hit=None
                if res(segs)==target: hit=len(segs)
                elif len(segs)>1 and res(segs[:-1])==target: hit=len(segs)-1
                done.add((m2.start(1),m2.end(1)))
                if hit:
                    off=sum(len(x)+2 for x in segs[:hit-1])
                    b=pos+m2.start(2)+off;out.append((b,b+len(tn)))
                    for m in re.finditer(r'(?<![\w.])'+re.escape(tn)+r'(?!\w)',m2.group(1)):
                        b=pos+m2.start(1)+m.start();out.append((b,b+len(tn)))
            for m2 in re.finditer(r'`([^`\n]+)`',line):
                if (m2.start(1),m2.end(1)) in done: continue
                for m in re.finditer(r'(?<![\w.\-/])((?:[A-Za-z_]\w*::)*)'+re.escape(tn)+r'(?!\w)',m2.group(1)):
                    segs=[x for x in m.group(1).split('::') if x]
                    if segs and CAMEL.match(segs[-1]): continue
                    r=res(segs+[tn]) if segs else (target if tn in getattr(s,'orig_unique',()) else None)
                    if r==target:
                        b=pos+m2.start(1)+m.end();out.append((b-len(tn),b))
        pos+=len(line)+1
    return sorted(set(out))
if __name__=='__main__':
    s=Tree(sys.argv[1])
    for a in sys.argv[2:]:
        n,f=a.split('@')
        r=s.sites((f,n))
        print('==',a,sum(len(h) for h,d in r.values()),'code',sum(len(d) for h,d in r.values()),'doc in',len(r))
        for k,(h,d) in sorted(r.items()): print('   ',k,len(h),len(d))
